// AdamW with decoupled decay (Loshchilov and Hutter, 2017), its gradients times a factor, in one pass over memory.
#include <cmath>

#include "simd.h"

// n elements: moment = beta·moment + fresh·g or g², parameter = keep·parameter − step·moment1/(√moment2·root + eps), with
// g = factor·gradient. `rounded`, if it is not null, becomes the parameters in BF16.
extern "C" void adamw_float32(long n, float *parameters, const float *gradients, float *moment1, float *moment2,
                              bf16 *rounded, float factor, float keep, float step, float root, float beta1,
                              float fresh1, float beta2, float fresh2, float eps) {
  for (long i = 0; i < n; i += W) {
    const long left = n - i < W ? n - i : W;
    const auto get = [&](const float *p) { return left == W ? load(p + i) : load(p + i, left); };
    const auto set = [&](auto *p, V v) { left == W ? store(p + i, v) : store(p + i, v, left); };
    const V g = get(gradients) * factor;
    const V first = get(moment1) * beta1 + g * fresh1, second = get(moment2) * beta2 + g * g * fresh2;
    V denominator;
    for (int j = 0; j < W; j++) denominator[j] = std::sqrt(second[j]);
    const V p = get(parameters) * keep - first * step / (denominator * root + eps);
    set(moment1, first), set(moment2, second), set(parameters, p);
    if (rounded) set(rounded, p);
  }
}
