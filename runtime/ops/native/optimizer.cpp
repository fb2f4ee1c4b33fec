// AdamW with decoupled decay (Loshchilov and Hutter, 2017), in one pass over memory. Gradients are scaled by a factor.
#include <cmath>

#include "simd.h"

namespace {

// For n elements and g = factor·gradient: moment1 = beta1·moment1 + fresh1·g, moment2 = beta2·moment2 + fresh2·g²,
// parameter = keep·parameter − step·moment1/(√moment2·root + eps). BF16 moments are rounded when they are stored, after
// the parameters have used them. `rounded`, if not null, gets the parameters in BF16.
template <class M>
INLINE void adamw(long n, float *parameters, const float *gradients, M *moment1, M *moment2, bf16 *rounded,
                  float factor, float keep, float step, float root, float beta1, float fresh1, float beta2,
                  float fresh2, float eps) {
  for (long i = 0; i < n; i += W) {
    const long left = n - i < W ? n - i : W;
    const auto get = [&](const auto *p) { return left == W ? load(p + i) : load(p + i, left); };
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

}  // namespace

// One function for each type of the moments.
#define ADAMW(M, suffix)                                                                                               \
  extern "C" void adamw_##suffix(long n, float *parameters, const float *gradients, M *moment1, M *moment2,            \
                                 bf16 *rounded, float factor, float keep, float step, float root, float beta1,         \
                                 float fresh1, float beta2, float fresh2, float eps) {                                 \
    adamw(n, parameters, gradients, moment1, moment2, rounded, factor, keep, step, root, beta1, fresh1, beta2, fresh2, \
          eps);                                                                                                        \
  }

ADAMW(float, float32)
ADAMW(bf16, bfloat16)
