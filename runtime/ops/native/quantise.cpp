// Quantising to E4M3 with an FP32 scale for each tile of a row, of a column or of a block, bit-identical to the ops in
// runtime/ops/quantise.py. Operands are FP32, BF16, or E4M3 with scales. Scales of rows and columns are stored tile by
// tile.
#include "fp8.h"

namespace {

constexpr long CHUNK = 64;  // columns at a time, for tiles of columns

// An operand: `at` returns n elements of row r from column c on, all in one tile.
template <class T> struct Plain {
  const T *x;
  long stride;
  V at(long r, long c, long n) const { return get(x + r * stride + c, n); }
};

struct Scaled {
  const e4m3 *x;
  long stride;
  const float *scales;
  long row, tile;
  V at(long r, long c, long n) const { return get(x + r * stride + c, n) * scales[r * row + c / TILE * tile]; }
};

INLINE V magnitude(V v) { return (V)((VU)v & 0x7fffffff); }

// The larger magnitude; NaN is ignored, as `most` is never NaN.
INLINE V most_of(V v, V most) { return larger(magnitude(v), most); }

// The scales of tiles with these largest magnitudes.
INLINE V scales_of(V most, bool pow2) {
  const V scaled = most * float(1 / 448.0), smallest = all(0x1p-126f);
  V s = scaled > smallest ? scaled : smallest;
  if (pow2) s = (V)(((VU)s + 0x7fffff) & 0xff800000);  // any bit of the significand carries into the exponent
  return most > V{} ? s : all(1);
}

// to[c, r] = from[r, c] for R rows and C columns, in squares of 16 × 16 bytes.
void turn(const e4m3 *from, long ld, long R, long C, e4m3 *to, long ldt) {
  typedef uint8_t Row __attribute__((vector_size(16)));
  for (long c = 0; c < C; c += 16)
    for (long r = 0; r < R; r += 16) {
      const e4m3 *x = from + r * ld + c;
      e4m3 *y = to + c * ldt + r;
      if (r + 16 > R || c + 16 > C) {
        for (long i = 0; i < 16 && r + i < R; i++)
          for (long j = 0; j < 16 && c + j < C; j++) y[j * ldt + i] = x[i * ld + j];
        continue;
      }
      Row v[16], w[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) memcpy(&v[i], x + i * ld, 16);
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++) {  // rows i and i + 8 interleaved, four times
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
          w[2 * i] = __builtin_shuffle(v[i], v[i + 8], Row{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
          w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 8], Row{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) v[i] = w[i];
      }
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) memcpy(y + j * ldt, &v[j], 16);
    }
}

// q[r, c] and s[c / 128, r], for W rows at a time, whose scales are one vector.
template <class Operand> void by_rows(long R, long C, Operand x, bool pow2, e4m3 *q, float *s) {
  for (long left = 0; left < C; left += TILE, s += R)
    for (long top = 0; top < R; top += W) {
      const long height = std::min(long(W), R - top), width = std::min(TILE, C - left);
      float largest_of[W] = {}, inverse[W];
      for (long r = 0; r < height; r++) {
        V most = {};
        each(width, [&](long c, long n) { most = most_of(x.at(top + r, left + c, n), most); });
        largest_of[r] = largest(most);
      }
      const V scale = scales_of(load(largest_of), pow2);
      set(s + top, scale, height);
      store(inverse, 1.0f / scale);
      for (long r = 0; r < height; r++) {
        e4m3 *to = q + (top + r) * C + left;
        each(width, [&](long c, long n) { set(to + c, x.at(top + r, left + c, n) * inverse[r], n); });
      }
    }
}

// q[c, r] and s[c] for the tiles of at most CHUNK columns.
template <bool WHOLE, class Operand>
void of_columns(long top, long height, long left, long width, Operand x, bool pow2, e4m3 *q, long ld, float *s) {
  constexpr long VECTORS = CHUNK / W;
  V values[TILE * VECTORS], most[VECTORS] = {}, inverse[VECTORS];
  e4m3 rows[TILE * CHUNK];
  const auto some = [&](long u) { return WHOLE ? W : std::clamp(width - u * W, 0L, long(W)); };
  for (long r = 0; r < height; r++)
#pragma GCC unroll 8
    for (long u = 0; u < VECTORS; u++) {
      const V v = values[r * VECTORS + u] = x.at(top + r, left + u * W, some(u));
      most[u] = most_of(v, most[u]);
    }
  for (long u = 0; u < VECTORS; u++) {
    const V scale = scales_of(most[u], pow2);
    set(s + u * W, scale, some(u));
    inverse[u] = 1.0f / scale;
  }
  for (long r = 0; r < height; r++)
#pragma GCC unroll 8
    for (long u = 0; u < VECTORS; u++) store(rows + r * CHUNK + u * W, values[r * VECTORS + u] * inverse[u]);
  turn(rows, CHUNK, height, width, q, ld);
}

// q[c, r] and s[r / 128, c].
template <class Operand> void by_columns(long R, long C, Operand x, bool pow2, e4m3 *q, float *s) {
  for (long top = 0; top < R; top += TILE, s += C)
    for (long left = 0; left < C; left += CHUNK) {
      const long height = std::min(TILE, R - top), width = std::min(CHUNK, C - left);
      (width == CHUNK ? of_columns<true, Operand> : of_columns<false, Operand>)(
          top, height, left, width, x, pow2, q + left * R + top, R, s + left);
    }
}

// q[n, k], s[n / 128, k / 128] and turned[k, n].
template <class T> void by_blocks(long N, long K, Plain<T> w, bool pow2, e4m3 *q, float *s, e4m3 *turned) {
  for (long top = 0; top < N; top += TILE)
    for (long left = 0; left < K; left += TILE) {
      const long bottom = std::min(N, top + TILE), width = std::min(TILE, K - left);
      V most = {};
      for (long n = top; n < bottom; n++)
        each(width, [&](long k, long some) { most = most_of(w.at(n, left + k, some), most); });
      const V scale = scales_of(all(largest(most)), pow2), inverse = 1.0f / scale;
      *s++ = scale[0];
      for (long n = top; n < bottom; n++)
        each(width, [&](long k, long some) {
          set(q + n * K + left + k, w.at(n, left + k, some) * inverse, some);
        });
      turn(q + top * K + left, K, bottom - top, width, turned + left * N + top, N);
    }
}

template <class T> void blocks(long E, long N, long K, const T *w, bool pow2, e4m3 *q, float *s, e4m3 *turned) {
  const long tiles = ((N + TILE - 1) / TILE) * ((K + TILE - 1) / TILE);
  for (long e = 0; e < E; e++, w += N * K, q += N * K, turned += N * K, s += tiles)
    by_blocks(N, K, Plain<T>{w, K}, pow2, q, s, turned);
}

}  // namespace

#define QUANTISE(T, suffix)                                                                                            \
  extern "C" void quantise_##suffix(long R, long C, const T *x, long stride, long pow2, e4m3 *q, float *s) {           \
    by_rows(R, C, Plain<T>{x, stride}, pow2, q, s);                                                                    \
  }                                                                                                                    \
  extern "C" void quantise_columns_##suffix(long R, long C, const T *x, long stride, long pow2, e4m3 *q, float *s) {   \
    by_columns(R, C, Plain<T>{x, stride}, pow2, q, s);                                                                 \
  }                                                                                                                    \
  extern "C" void quantise_blocks_##suffix(long E, long N, long K, const T *w, long pow2, e4m3 *q, float *s,           \
                                           e4m3 *turned) {                                                             \
    blocks(E, N, K, w, pow2, q, s, turned);                                                                            \
  }
QUANTISE(float, float32)
QUANTISE(bf16, bfloat16)

extern "C" void requantise_e4m3(long R, long C, const e4m3 *x, long stride, const float *scales, long row_stride,
                                long tile_stride, long pow2, e4m3 *q, float *s) {
  by_columns(R, C, Scaled{x, stride, scales, row_stride, tile_stride}, pow2, q, s);
}

extern "C" void dequantise_e4m3(long R, long C, const e4m3 *x, long stride, const float *scales, long row_stride,
                                long tile_stride, float *y) {
  const Scaled from{x, stride, scales, row_stride, tile_stride};
  for (long r = 0; r < R; r++, y += C)
    for (long left = 0; left < C; left += TILE)
      each(std::min(TILE, C - left), [&](long c, long n) { set(y + left + c, from.at(r, left + c, n), n); });
}
