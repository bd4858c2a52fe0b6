// Speed of the forward pass and the loss alone: what validation is measured against (bench.py).
//
//   build/cuda-bf16-cudnn/bench_forward -e d12 -b 64 -t 1024 -m 200 -i train.bin -v 0 -s 0
//
// Takes the trainer's flags, and -m micro-batches a round. One micro-batch lies in device memory from
// the start, so that nothing is read or copied between two passes. Prints a line a round; the first
// one is warm-up. train_gpt2.cu is compiled in, or linked, with LLMC_NO_MAIN.
#include <cstdio>
#include <string>

#include "llmc/gpt2.h"
#include "llmc/run.h"

namespace llmc {
namespace {

constexpr int kRounds = 3;

void run_forward(int argc, char** argv) {
    Run run;
    run.command_line.assign(argv, argv + argc);
    run.options = parse_options(argc, argv);
    set_up(run);
    if (run.multi_gpu.num_processes > 1) throw Error("bench_forward: start one process alone");
    start(run);
    GPT2* model = &run.model;
    const int B = run.options.batch_size, T = run.options.seq_len, count = run.options.val_batches;
    const MicroBatch batch = run.batch_upload.put(model->main_stream, [&](int* in, int* out) {
        run.train_data->read_validation_micro_batch(0, B, in, out);
    });
    DeviceBuffer<double> loss(1);
    cudaEvent_t begin = nullptr, end = nullptr;
    cuda_check(cudaEventCreateWithFlags(&begin, cudaEventDefault));
    cuda_check(cudaEventCreateWithFlags(&end, cudaEventDefault));
    for (int round = 0; round < kRounds; ++round) {
        cuda_check(cudaEventRecord(begin, model->main_stream));
        for (int i = 0; i < count; ++i) {
            gpt2_forward(model, batch.inputs, B, T);
            gpt2_loss(model, batch, B, T, loss.get());
        }
        cuda_check(cudaEventRecord(end, model->main_stream));
        cuda_check(cudaStreamSynchronize(model->main_stream));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, begin, end));
        const double tokens = static_cast<double>(B) * T * count;
        std::printf("forward: %d micro-batches, %.4f ms each, %.0f tok/s\n", count, ms / count,
                    tokens / ms * 1e3);
        std::fflush(stdout);
    }
    cuda_check(cudaEventDestroy(begin));
    cuda_check(cudaEventDestroy(end));
    multi_gpu_config_free(&run.multi_gpu);
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
    try {
        llmc::run_forward(argc, argv);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "bench_forward: %s\n", error.what());
        return 1;
    }
}
