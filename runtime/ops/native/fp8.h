// Vectors of E4M3 numbers: one sign bit, four bits of exponent, three of significand. 448 is the largest number; 0x7f
// and 0xff are NaN; there are no infinities.
#pragma once

#include <algorithm>

#include "simd.h"

typedef uint8_t VB __attribute__((vector_size(W)));

struct e4m3 {
  uint8_t bits;
};

constexpr long TILE = 128;

INLINE V load(const e4m3 *p) {
  VB bytes;
  memcpy(&bytes, p, sizeof bytes);
  const VU code = __builtin_convertvector(bytes, VU), size = code & 0x7f, shifted = size << 20;
  const V tiny = (V)(shifted + (121u << 23)) - 0x1p-6f;  // below 2^-6 numbers are subnormal
  VU bits = (VI)size < 8 ? (VU)tiny : shifted + (120u << 23);
  bits = (VI)size == 0x7f ? VU{} + 0x7fc00000 : bits;
  return (V)(bits | (code & 0x80) << 24);
}

// Round to nearest, ties to even. v is NaN, which keeps its sign, or below 464, the first number that would become NaN.
INLINE void store(e4m3 *p, V v) {
  const VU bits = (VU)v, size = bits & 0x7fffffff;
  const VU normal = (size - (120u << 23) + 0x7ffff + ((size >> 20) & 1)) >> 20;
  const VU tiny = (VU)((V)size + 0x1p14f) - (141u << 23);  // 2^14 has steps of 2^-9, the smallest number
  VU code = (VI)size < (121 << 23) ? tiny : normal;
  code = ((VI)size > 0x7f800000 ? VU{} + 0x7f : code) | (bits >> 24 & 0x80);
  const VB bytes = __builtin_convertvector(code, VB);
  memcpy(p, &bytes, sizeof bytes);
}
