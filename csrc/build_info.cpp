// What this library was built from and for, as a JSON object: version, compiler, targets.
#include "export.h"

FASTGRPO_EXPORT const char* fastgrpo_build_info() {
  return "{\"version\": \"" FASTGRPO_VERSION "\", \"compiler\": \"" FASTGRPO_COMPILER "\", \"targets\": \"" FASTGRPO_TARGETS
         "\"}";
}
