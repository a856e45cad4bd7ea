// AdamW's update of one tensor, memory read and written once: see one_pass_adamw.py.

#include <cmath>
#include <cstdint>
#include <cstring>

// A smaller tensor is done before a second thread has begun.
static const int64_t min_size_for_threads = 1 << 15;

static inline float from_bf16(uint16_t number) {
    uint32_t bits = static_cast<uint32_t>(number) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to the nearest, ties to even; the addition would make an infinity of some NaNs.
static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(number != number ? 0x7fc0 : rounded);
}

// Gradients are read in bf16, master and moments updated in fp32, weights written in bf16.
extern "C" void update(int64_t size, uint16_t* __restrict weight, const uint16_t* __restrict gradient,
                       float* __restrict master, float* __restrict mean, float* __restrict square,
                       float kept, float beta1_rest, float beta2, float beta2_rest, float rate,
                       float divisor, float eps) {
#pragma omp parallel for simd schedule(static) if (size > min_size_for_threads)
    for (int64_t i = 0; i < size; ++i) {
        float g = from_bf16(gradient[i]);
        float m = mean[i] + beta1_rest * (g - mean[i]);
        float v = beta2 * square[i] + beta2_rest * g * g;
        float p = kept * master[i] - rate * m / (sqrtf(v) / divisor + eps);
        mean[i] = m;
        square[i] = v;
        master[i] = p;
        weight[i] = to_bf16(p);
    }
}
