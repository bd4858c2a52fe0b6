// Attention's backward pass.
// One of the objects of kernels that train_gpt2.cu is linked with (docs/layout.md).
#include "llmc/launchers.h"

// After the declarations that these must match.
#include "llmc/attention_backward.cuh"
