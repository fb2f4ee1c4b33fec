// Low-bit numbers, as vectors of their codes: a sign, E bits of the exponent and M of the significand. LARGEST is the
// largest number. NONE: whether the code of all ones is NaN.
#pragma once

#include "simd.h"

template <int E, int M, int LARGEST, bool NONE> struct Element {
  static constexpr int LEAST = 2 - (1 << (E - 1));  // the exponent of the smallest normal number
  static constexpr uint32_t SIGN = 1u << (E + M);

  // Round to nearest, ties to even codes; or up if the lost fraction of a unit in the last place exceeds the threshold.
  template <bool NEAREST> INLINE VU encode(V x, V threshold) {
    const VU bits = (VU)x, size = bits & 0x7fffffff;
    const VI none = (VI)size > 0x7f800000;
    const V a = none ? V{} : smaller((V)size, all(LARGEST));
    VI binade = (VI)((VU)a >> 23) - 127;
    binade = binade > LEAST ? binade : VI{} + LEAST;
    V units = a * (V)((M - binade + 127) << 23);  // a power of two: exact
    if (NEAREST) {
      units = (units + 0x1.8p23f) - 0x1.8p23f;
    } else {
      const V whole = __builtin_convertvector(__builtin_convertvector(units, VI), V);
      units = whole + (units - whole > threshold ? all(1) : V{});
    }
    // one binade up, codes are 2^M larger; units that fill the binade carry into the next
    VU codes = (VU)((binade - LEAST) << M) + (VU)__builtin_convertvector(units, VI);
    if (NONE) codes = none ? VU{} + (SIGN - 1) : codes;
    return codes | bits >> 31 << (E + M);
  }

  INLINE V decode(VU code) {
    constexpr uint32_t FIRST = uint32_t(LEAST + 127) << 23;
    const VU size = code & (SIGN - 1), shifted = size << (23 - M);
    const V tiny = (V)(shifted + FIRST) - (V)(VU{} + FIRST);  // subnormal: no hidden bit
    VU bits = (VI)size < (1 << M) ? (VU)tiny : shifted + (FIRST - (1u << 23));
    if (NONE) bits = (VI)size == int(SIGN - 1) ? VU{} + 0x7fc00000 : bits;
    return (V)(bits | (code & SIGN) << (31 - E - M));
  }
};
