// FASTGRPO_EXPORT marks the library's entry points: C names, the only symbols it shows.
#pragma once

#define FASTGRPO_EXPORT extern "C" __attribute__((visibility("default")))
