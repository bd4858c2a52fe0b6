// All kernels that compile quickly.
// One of the objects of kernels that train_gpt2.cu is linked with (docs/layout.md).
#include "llmc/launchers.h"

// After the declarations that these must match.
#include "llmc/adamw.cuh"
#include "llmc/bias.cuh"
#include "llmc/device_code.cuh"
#include "llmc/encoder.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/tree.cuh"
