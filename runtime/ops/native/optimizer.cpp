// AdamW with decoupled decay (Loshchilov and Hutter, 2017), in one pass over memory. Gradients are scaled by a factor.
#include <cmath>

#include "simd.h"

namespace {

// Store n numbers. Those that last for many steps keep denormal numbers.
INLINE void save(float *p, V v, long n) { set(p, v, n); }
INLINE void save(bf16 *p, V v, long n) {
  const VH h = narrow_all(v);
  n == W ? memcpy(p, &h, sizeof h) : memcpy(p, &h, n * sizeof *p);
}

// For n elements and g = factor·gradient: moment1 = beta1·moment1 + fresh1·g, moment2 = beta2·moment2 + fresh2·g²,
// parameter = keep·parameter − step·moment1/(√moment2·root + eps). BF16 moments are rounded when they are stored, after
// the parameters have used them. `rounded`, if not null, gets the parameters in BF16.
template <class M>
INLINE void adamw(long n, float *parameters, const float *gradients, M *moment1, M *moment2, bf16 *rounded,
                  float factor, float keep, float step, float root, float beta1, float fresh1, float beta2,
                  float fresh2, float eps) {
  for (long i = 0; i < n; i += W) {
    const long left = n - i < W ? n - i : W;
    const V g = get(gradients + i, left) * factor;
    const V first = get(moment1 + i, left) * beta1 + g * fresh1, second = get(moment2 + i, left) * beta2 + g * g * fresh2;
    V denominator;
    for (int j = 0; j < W; j++) denominator[j] = std::sqrt(second[j]);
    const V p = get(parameters + i, left) * keep - first * step / (denominator * root + eps);
    save(moment1 + i, first, left), save(moment2 + i, second, left), save(parameters + i, p, left);
    if (rounded) save(rounded + i, p, left);
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
