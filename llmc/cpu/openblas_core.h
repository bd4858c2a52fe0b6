// The core that OpenBLAS computes with: which kernels, hence how fast, and which bits.
//
// OpenBLAS picks a core by the processor's model number when it is loaded, and an old release knows
// no new numbers: 0.3.21 takes a Sapphire Rapids for a Prescott, at a fifth of the speed. Only the
// environment can overrule it, and it is read before main. The features that the processor reports
// do not age so. OPENBLAS_L2_SIZE is left alone: of the cores chosen here none sizes its blocks by
// the second-level cache (0.3.21 does not even read the variable; later releases do, for virtual
// machines that report a cache of size 0).
#pragma once

#include <cblas.h>
#include <strings.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace llmc::cpu {

struct CpuFeatures {
    bool amd = false;
    bool avx2 = false;    // AVX2 and FMA
    bool avx512 = false;  // F, BW, DQ, VL and CD
};

inline CpuFeatures cpu_features() {
    CpuFeatures features;
#if defined(__x86_64__)
    __builtin_cpu_init();
    features.amd = __builtin_cpu_is("amd");
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    features.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
#endif
    return features;
}

// A value for OPENBLAS_CORETYPE, or null where OpenBLAS's own choice is as good as any.
inline const char* best_openblas_core(const CpuFeatures& features) {
    if (features.avx512) return "SKYLAKEX";
    if (features.avx2) return features.amd ? "ZEN" : "HASWELL";
    return nullptr;
}

// 0 for cores without AVX2, 1 for those with, 2 for those with AVX-512. A name that is not in the
// lists is newer than they are and counts as 2: a better OpenBLAS must not be held back.
inline int openblas_core_level(const char* core) {
    const auto is_any = [core](std::initializer_list<const char*> names) {
        for (const char* name : names) {
            if (strcasecmp(core, name) == 0) return true;
        }
        return false;
    };
    if (is_any({"Unknown",   "Katmai",      "Coppermine", "Northwood",  "Prescott",
                "Banias",    "Atom",        "Core2",      "Penryn",     "Dunnington",
                "Nehalem",   "Sandybridge", "Athlon",     "Opteron",    "Opteron_SSE3",
                "Barcelona", "Bobcat",      "Bulldozer",  "Piledriver", "Steamroller",
                "Nano"})) {
        return 0;
    }
    return is_any({"Haswell", "Excavator", "Zen"}) ? 1 : 2;
}

// The core in use. Ranks whose names differ compute different bits.
inline const char* openblas_core_name() {
    return openblas_get_corename();
}

// Call this first in main. Where OpenBLAS chose a lesser core than the processor allows, it sets
// OPENBLAS_CORETYPE (and OPENBLAS_NUM_THREADS to 1, unless the user set it) and starts the program
// once more in its place; otherwise it returns at once. An OPENBLAS_CORETYPE that the user set is
// never changed.
inline void select_openblas_core(char** argv) {
    constexpr const char* kStartedAgain = "LLMC_STARTED_AGAIN_FOR_OPENBLAS";
    if (std::getenv(kStartedAgain) != nullptr) {
        // The kernel named the process after /proc/self/exe; top and pgrep show this name.
        if (argv[0] != nullptr) {
            const char* slash = std::strrchr(argv[0], '/');
            prctl(PR_SET_NAME, slash != nullptr ? slash + 1 : argv[0], 0, 0, 0);
        }
        return;
    }
    const char* users = std::getenv("OPENBLAS_CORETYPE");
    if (users != nullptr && users[0] == '\0') {  // which OpenBLAS takes for a core of its own
        unsetenv("OPENBLAS_CORETYPE");
        execv("/proc/self/exe", argv);
    }
    if (users != nullptr) return;
    const char* best = best_openblas_core(cpu_features());
    if (best == nullptr) return;
    if (openblas_core_level(openblas_core_name()) >= openblas_core_level(best)) return;
    setenv("OPENBLAS_CORETYPE", best, 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 0);
    setenv(kStartedAgain, "1", 1);
    execv("/proc/self/exe", argv);
    // Without /proc the run goes on with what OpenBLAS chose: slower, not wrong.
}

}  // namespace llmc::cpu
