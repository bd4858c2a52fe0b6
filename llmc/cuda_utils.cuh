// What the kernels share: 16-byte vectors, conversions to and from float, sums in a fixed order,
// and pieces over tables of runs.
//
// A kernel that is bound by memory moves 16 bytes an access and asks for several before it uses the
// first. Whether the accesses are 16 bytes wide or single elements never changes which thread adds
// what in which order, so that a result's bits do not depend on where a buffer starts.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "llmc/cuda_common.h"
#include "llmc/precision.h"

namespace llmc {

constexpr int kWarpSize = 32;

// ---- launches ----

// Throws Error naming the launcher's place when the launch before it failed.
inline void launch_check(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    cuda_check(cudaGetLastError(), file, line);
}

template <class I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
    return (a + b - 1) / b;
}

// Whether vectors of `bytes` may be loaded from all of `pointers`.
template <class... P>
__host__ __device__ inline bool all_aligned(size_t bytes, const P*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) | ...) & (bytes - 1)) == 0;
}

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// Lets blocks of `kernel` have `bytes` of dynamic shared memory; above 48 KB one has to ask.
template <class Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared));
}

// ---- conversions ----

__device__ inline float widen(float value) {
    return value;
}
__device__ inline float widen(bf16 value) {
    return __bfloat162float(value);
}

// Rounds to T, to nearest even; a NaN becomes 0x7fff in bf16.
template <class T>
__device__ inline T narrow(float value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        return __float2bfloat16_rn(value);
    }
}

// ---- arithmetic of the special function unit ----
//
// Both within about 2^-22. They flush denormals, which the callers' arguments keep out of play.

constexpr float kLog2e = 1.4426950408889634f;

__device__ inline float approximate_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- 16-byte vectors ----

template <class T>
struct Packed128 {
    static constexpr int kSize = 16 / sizeof(T);
    uint4 bits;
};

template <class T>
__device__ inline Packed128<T> load128(const T* from) {
    return {*reinterpret_cast<const uint4*>(from)};
}
// For data that nobody reads again soon: the first to leave the cache. A kernel that also stores either
// streams both ways or neither: such loads beside stores that stay cost up to 9 % of its speed (H200).
template <class T>
__device__ inline Packed128<T> load128_streaming(const T* from) {
    return {__ldcs(reinterpret_cast<const uint4*>(from))};
}
template <class T>
__device__ inline void store128(T* to, Packed128<T> value) {
    *reinterpret_cast<uint4*>(to) = value.bits;
}
template <class T>
__device__ inline void store128_streaming(T* to, Packed128<T> value) {
    __stcs(reinterpret_cast<uint4*>(to), value.bits);
}

// Two bf16 in a word, the first in its low half.
__device__ inline float low_half(uint32_t word) {
    return __uint_as_float(word << 16);
}
__device__ inline float high_half(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
}
__device__ inline uint32_t two_halves(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}

template <class T>
__device__ inline void unpack(float (&x)[Packed128<T>::kSize], const Packed128<T>& packed) {
    const uint32_t word[4] = {packed.bits.x, packed.bits.y, packed.bits.z, packed.bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, float>) {
            x[i] = __uint_as_float(word[i]);
        } else {
            x[2 * i] = low_half(word[i]);
            x[2 * i + 1] = high_half(word[i]);
        }
    }
}

template <class T>
__device__ inline Packed128<T> pack(const float (&x)[Packed128<T>::kSize]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, float>) {
            word[i] = __float_as_uint(x[i]);
        } else {
            word[i] = two_halves(x[2 * i], x[2 * i + 1]);
        }
    }
    return {make_uint4(word[0], word[1], word[2], word[3])};
}

// Makes the compiler forget what it has unpacked from `packed`: two instructions that unpack it
// once more cost less than registers that keep every float.
template <class T>
__device__ inline void unpack_again(Packed128<T>& packed) {
    if constexpr (!std::is_same_v<T, float>) {
        asm volatile(""
                     : "+r"(packed.bits.x), "+r"(packed.bits.y), "+r"(packed.bits.z),
                       "+r"(packed.bits.w));
    }
}

// The first `count` elements from `from` on, one by one; zeros in the others' places.
template <class T>
__device__ inline Packed128<T> load_some(const T* from, int count) {
    float x[Packed128<T>::kSize];
#pragma unroll
    for (int k = 0; k < Packed128<T>::kSize; ++k) x[k] = k < count ? widen(from[k]) : 0.0f;
    return pack<T>(x);
}
template <class T>
__device__ inline void store_some(T* to, const Packed128<T>& value, int count) {
    float x[Packed128<T>::kSize];
    unpack(x, value);
#pragma unroll
    for (int k = 0; k < Packed128<T>::kSize; ++k) {
        if (k < count) to[k] = narrow<T>(x[k]);
    }
}

// A group of kSize neighbours, of which `count` exist: one access if `vector`, which says that the
// address is aligned and that groups are whole or empty.
template <class T>
__device__ inline Packed128<T> load_group(const T* from, int count, bool vector) {
    if (!vector) return load_some(from, count);
    return count > 0 ? load128(from) : Packed128<T>{make_uint4(0, 0, 0, 0)};
}
template <class T>
__device__ inline Packed128<T> load_group_streaming(const T* from, int count, bool vector) {
    if (!vector) return load_some(from, count);
    return count > 0 ? load128_streaming(from) : Packed128<T>{make_uint4(0, 0, 0, 0)};
}
template <class T>
__device__ inline void store_group(T* to, const Packed128<T>& value, int count, bool vector) {
    if (!vector) {
        store_some(to, value, count);
    } else if (count > 0) {
        store128(to, value);
    }
}

template <class T>
__device__ inline void store_group_streaming(T* to, const Packed128<T>& value, int count,
                                             bool vector) {
    if (!vector) {
        store_some(to, value, count);
    } else if (count > 0) {
        store128_streaming(to, value);
    }
}

// The same for kCount neighbours as floats, in as many accesses as T needs.
template <class T, int kCount>
__device__ inline void load_floats(float (&x)[kCount], const T* from, int count, bool vector) {
    constexpr int kWidth = Packed128<T>::kSize;
    static_assert(kCount % kWidth == 0, "vectors of T must fill the group");
#pragma unroll
    for (int i = 0; i < kCount; i += kWidth) {
        float part[kWidth];
        unpack(part, load_group(from + i, count - i, vector));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[i + k] = part[k];
    }
}
template <class T, int kCount>
__device__ inline void store_floats(T* to, const float (&x)[kCount], int count, bool vector) {
    constexpr int kWidth = Packed128<T>::kSize;
    static_assert(kCount % kWidth == 0, "vectors of T must fill the group");
#pragma unroll
    for (int i = 0; i < kCount; i += kWidth) {
        float part[kWidth];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) part[k] = x[i + k];
        store_group(to + i, pack<T>(part), count - i, vector);
    }
}
// Adds x to what is there, with one rounding.
template <class T, int kCount>
__device__ inline void add_floats(T* to, const float (&x)[kCount], int count, bool vector) {
    float sum[kCount];
    load_floats(sum, to, count, vector);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] += x[k];
    store_floats(to, sum, count, vector);
}

// ---- reductions ----

// Every lane gets the sum, in the same bits: at each step the two that add hold the same pair.
template <class A>
__device__ inline A warp_sum(A value) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

// NaN is passed over.
__device__ inline float warp_max(float value) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

// Sums of `kCount` values over the block, by warp and then in the order of the warps; every thread
// gets them. `shared` holds kCount values for each warp. No barrier at the end: the next call must
// use other memory, the one after it may use this again. kWarps: of the block, where the code knows
// them; 0 where only the launch does.
template <int kWarps = 0, int kCount, class A>
__device__ inline void block_sum(A (&value)[kCount], A* shared) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = warp_sum(value[k]);
    if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) shared[warp * kCount + k] = value[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = shared[k];
    const int warps = kWarps > 0 ? kWarps : blockDim.x / kWarpSize;
    for (int w = 1; w < warps; ++w) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) value[k] += shared[w * kCount + k];
    }
}

// As block_sum.
template <int kWarps = 0>
__device__ inline float block_max(float value, float* shared) {
    value = warp_max(value);
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    const int warps = kWarps > 0 ? kWarps : blockDim.x / kWarpSize;
    for (int w = 0; w < warps; ++w) value = fmaxf(value, shared[w]);
    return value;
}

// ---- tables of runs ----
//
// Launches over a table have pieces of a fixed number of elements. A run has as many as it needs,
// and they are numbered through, so that a table of one huge run and many small ones keeps all
// blocks busy. The table is in device memory: each block makes the numbering for itself.

// Runs of one launch: their piece numbers lie in shared memory, 4 bytes a run.
constexpr int kMaxRuns = 8192;

// The run that piece `piece` belongs to: the first whose ends[run] is above it. ends[i] is the
// number of pieces of runs 0 ... i, and `piece` less than the last.
__host__ __device__ inline int run_of_piece(const uint32_t* ends, int num_runs, uint32_t piece) {
    int low = 0, high = num_runs - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > piece) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Fills ends[0 ... num_runs-1] (shared memory); pieces_of(i) is the number of pieces of run i. For
// blocks of whole warps; ends with a barrier.
template <class PiecesOf>
__device__ inline void number_pieces(uint32_t* ends, int num_runs, PiecesOf&& pieces_of) {
    __shared__ uint32_t warp_total[kWarpSize];
    const int threads = blockDim.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int share = ceil_div(num_runs, threads);
    const int begin = min(num_runs, static_cast<int>(threadIdx.x) * share);
    const int end = min(num_runs, begin + share);
    uint32_t mine = 0;
    for (int i = begin; i < end; ++i) mine += pieces_of(i);
    uint32_t up_to_here = mine;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, up_to_here, offset);
        if (lane >= offset) up_to_here += before;
    }
    if (lane == kWarpSize - 1) warp_total[warp] = up_to_here;
    __syncthreads();
    uint32_t running = up_to_here - mine;
    for (int w = 0; w < warp; ++w) running += warp_total[w];
    for (int i = begin; i < end; ++i) {
        running += pieces_of(i);
        ends[i] = running;
    }
    __syncthreads();
}

// Calls launch(first_run, num_runs, blocks) for stretches of at most kMaxRuns of `num_runs` runs of
// up to `max_count` elements in pieces of `piece`. A block for each piece, but at most
// `blocks_per_multiprocessor`, which then take several: no kernel here lets its grid change its
// bits.
template <class Launch>
void for_each_table_launch(int num_runs, size_t max_count, size_t piece,
                           int blocks_per_multiprocessor, Launch&& launch) {
    const size_t most = static_cast<size_t>(blocks_per_multiprocessor) *
                        device_attribute(cudaDevAttrMultiProcessorCount);
    for (int first = 0; first < num_runs; first += kMaxRuns) {
        const int count = num_runs - first < kMaxRuns ? num_runs - first : kMaxRuns;
        const size_t pieces = static_cast<size_t>(count) * ceil_div(max_count, piece);
        launch(first, count, static_cast<unsigned>(pieces < most ? pieces : most));
    }
}

}  // namespace llmc
