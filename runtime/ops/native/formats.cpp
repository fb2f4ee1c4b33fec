// Tensors in tiles with scales, bit-identical to the ops in runtime/ops/formats.py: the largest magnitude of each tile,
// encoding and decoding; and the random numbers of runtime/ops/stochastic.py. A tensor is E matrices of R rows and C
// columns. A tile has `height` rows and `width` columns; the last tile along a dimension may be smaller.
#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"

namespace {

typedef uint8_t VB __attribute__((vector_size(W)));

constexpr long WIDEST = 128;  // most columns of a tile

// One code per byte.
struct E4M3 : Element<4, 3, 448, true> {
  static constexpr long bytes(long columns) { return columns; }
  static void pack(const uint8_t *codes, long n, uint8_t *to) { std::copy_n(codes, n, to); }
  static void unpack(const uint8_t *from, long n, uint8_t *codes) { std::copy_n(from, n, codes); }
};

// Two codes per byte, the first of a pair in the low bits.
struct E2M1 : Element<2, 1, 6, false> {
  static constexpr long bytes(long columns) { return (columns + 1) / 2; }
  static void pack(uint8_t *codes, long n, uint8_t *to) {
    if (n % 2) codes[n] = 0;
    for (long i = 0; i < (n + 1) / 2; i++) to[i] = codes[2 * i] | codes[2 * i + 1] << 4;
  }
  static void unpack(const uint8_t *from, long n, uint8_t *codes) {
    for (long i = 0; i < (n + 1) / 2; i++) codes[2 * i] = from[i] & 15, codes[2 * i + 1] = from[i] >> 4;
  }
};

// Call f(row of the whole tensor, first column, columns, tile) for each row of each tile, row by row.
template <class F> INLINE void each_row(long E, long R, long C, long height, long width, F f) {
  const long across = (C + width - 1) / width, down = (R + height - 1) / height;
  for (long e = 0; e < E; e++)
    for (long r = 0; r < R; r++)
      for (long t = 0; t < across; t++)
        f(e * R + r, t * width, std::min(width, C - t * width), (e * down + r / height) * across + t);
}

template <class Element, bool NEAREST>
void encode(long E, long R, long C, const float *x, long height, long width, const float *inverse, const float *threshold,
            uint8_t *to) {
  each_row(E, R, C, height, width, [&](long r, long left, long columns, long tile) {
    uint8_t codes[WIDEST + W];
    const float *from = x + r * C + left, *limit = threshold + (NEAREST ? 0 : r * C + left);
    each(columns, [&](long c, long n) {
      const V limits = NEAREST ? V{} : get(limit + c, n);
      const VB bytes = __builtin_convertvector(
          Element::template encode<NEAREST>(get(from + c, n) * inverse[tile], limits), VB);
      memcpy(codes + c, &bytes, sizeof bytes);
    });
    Element::pack(codes, columns, to + r * Element::bytes(C) + Element::bytes(left));
  });
}

template <class Element>
void encode(long E, long R, long C, const float *x, long height, long width, const float *inverse, const float *threshold,
            uint8_t *to) {
  (threshold ? encode<Element, false> : encode<Element, true>)(E, R, C, x, height, width, inverse, threshold, to);
}

// Decode numbers and multiply them by the scales of their tiles.
template <class Element>
void decode(long E, long R, long C, const uint8_t *from, long height, long width, const float *scales, float *y) {
  each_row(E, R, C, height, width, [&](long r, long left, long columns, long tile) {
    uint8_t codes[WIDEST + W];
    Element::unpack(from + r * Element::bytes(C) + Element::bytes(left), columns, codes);
    each(columns, [&](long c, long n) {
      VB bytes;
      memcpy(&bytes, codes + c, sizeof bytes);
      set(y + r * C + left + c, Element::decode(__builtin_convertvector(bytes, VU)) * scales[tile], n);
    });
  });
}

uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

}  // namespace

// The largest magnitudes of tiles. NaN counts as infinity if `nan`, else it is skipped.
extern "C" void magnitudes_float32(long E, long R, long C, const float *x, long height, long width, long nan, float *most) {
  const long tiles = E * ((R + height - 1) / height) * ((C + width - 1) / width);
  std::fill_n(most, tiles, 0.0f);
  each_row(E, R, C, height, width, [&](long r, long left, long columns, long tile) {
    V found = {};
    each(columns, [&](long c, long n) {
      const VU size = (VU)get(x + r * C + left + c, n) & 0x7fffffff;
      const V counted = nan ? ((VI)size > 0x7f800000 ? all(INFINITY) : (V)size) : (V)size;
      found = larger(counted, found);  // a NaN in `counted` is skipped
    });
    most[tile] = std::max(most[tile], largest(found));
  });
}

#define ELEMENT(Element, suffix)                                                                                       \
  extern "C" void encode_##suffix(long E, long R, long C, const float *x, long height, long width,                     \
                                  const float *inverse, const float *threshold, uint8_t *codes) {                      \
    encode<Element>(E, R, C, x, height, width, inverse, threshold, codes);                                             \
  }                                                                                                                    \
  extern "C" void decode_##suffix(long E, long R, long C, const uint8_t *codes, long height, long width,               \
                                  const float *scales, float *y) {                                                     \
    decode<Element>(E, R, C, codes, height, width, scales, y);                                                         \
  }
ELEMENT(E4M3, e4m3)
ELEMENT(E2M1, e2m1)

// Numbers in [0, 1): the 24 highest bits of a hash of the bits of an element's row and of its column.
extern "C" void thresholds_float32(long R, long C, const float *x, long seed, float *y) {
  std::vector<uint64_t> columns(C);
  for (long c = 0; c < C; c++) columns[c] = mixed((c + 1) * 0x9E3779B97F4A7C15);
  for (long r = 0; r < R; r++, x += C, y += C) {
    uint64_t sum = 0;
    for (long c = 0; c < C; c++) {
      int32_t bits;
      memcpy(&bits, x + c, sizeof bits);
      sum += uint64_t(int64_t(bits)) * (columns[c] | 1);
    }
    const uint64_t row = mixed(sum ^ uint64_t(seed));
    for (long c = 0; c < C; c++) y[c] = float(int32_t(mixed(row + columns[c]) >> 40)) * 0x1p-24f;
  }
}
