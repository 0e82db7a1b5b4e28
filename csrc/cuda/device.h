// The runtime under one name, so that a kernel file reads the same for CUDA and HIP.
#pragma once

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define FASTGRPO_RT(name) hip##name
#define __grid_constant__
#else
#include <cuda_runtime.h>
#define FASTGRPO_RT(name) cuda##name
#endif

namespace fastgrpo {
using Stream = FASTGRPO_RT(Stream_t);

// The runtime's code of the last launch: 0 is success.
inline int launch_status() { return static_cast<int>(FASTGRPO_RT(GetLastError)()); }
}  // namespace fastgrpo
