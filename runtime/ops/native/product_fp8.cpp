// Products of E4M3 matrices with scales: sums over tiles of 128, each times the scales of its two tiles, are added in
// FP32. Both operands are contiguous along the dimension that is summed over.
//
// E4M3 numbers are exact in BF16, and their products in FP32. So codes are widened once, a row by row, b into panels of
// columns: to pairs of BF16 if there are instructions that multiply them, else to FP32. A 32-bit element holds a pair
// or one number.
#include "fp8.h"
#include "product.h"

namespace {

constexpr long LEFT = 192;  // rows of a at a time
constexpr long PANEL = WIDE * W;

struct Operand {
  const e4m3 *x;
  long stride;
  const float *scales;  // for row r and tile t: scales[r / rows · row + t · tile]
  long row, tile, rows;
  float scale(long r, long t) const { return scales[r / rows * row + t * tile]; }
};

#if defined(__AVX512BF16__)
constexpr long NUMBERS = 2;  // numbers per element

INLINE V multiply(V sums, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }

// Widen 32 codes to 16 pairs.
INLINE V widened(const e4m3 *p) {
  typedef uint16_t Codes __attribute__((vector_size(64)));
  typedef int16_t Signed __attribute__((vector_size(64)));
  alignas(64) static const uint16_t tiny[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // 0 … 7 · 2^-9
  const Codes code = (Codes)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  const Codes size = code & 0x7f;
  Codes bits = (size << 4) + (120u << 7);
  bits = (Signed)size < 8 ? (Codes)_mm512_permutexvar_epi16((__m512i)size, _mm512_load_si512(tiny)) : bits;
  bits = (Signed)size == 0x7f ? Codes{} + 0x7fc0 : bits;
  return (V)(bits | (code & 0x80) << 8);
}
#else
constexpr long NUMBERS = 1;

INLINE V multiply(V sums, V a, V b) { return sums + a * b; }
INLINE V widened(const e4m3 *p) { return load(p); }
#endif

constexpr long STEPS = TILE / NUMBERS;  // elements per row of a tile

// Widen n codes into whole vectors of elements, with zeros after the last code.
void widen(const e4m3 *from, long n, float *to) {
  if (n == TILE) {
    for (long i = 0; i < STEPS; i += W) store(to + i, widened(from + i * NUMBERS));
    return;
  }
  long i = 0;
  for (; i + W * NUMBERS <= n; i += W * NUMBERS, to += W) store(to, widened(from + i));
  if (i == n) return;
  e4m3 codes[W * NUMBERS] = {};
  std::copy_n(from + i, n - i, codes);
  store(to, widened(codes));
}

// The range that is summed over, split into pieces, each in one tile.
struct Pieces {
  long start, end;
  long count() const { return (end + TILE - 1) / TILE - start / TILE; }
  long tile(long i) const { return start / TILE + i; }
  long from(long i) const { return i ? tile(i) * TILE : start; }
  long size(long i) const { return std::min(end, (tile(i) + 1) * TILE) - from(i); }
  long steps(long i) const { return (size(i) + NUMBERS - 1) / NUMBERS; }  // elements
};

// Copy a panel of columns from n0 on, with zeros after the last: each piece in rows of PANEL elements, and its scales.
void take_panel(Operand b, long N, long n0, Pieces pieces, float *panel, float *scales) {
  alignas(64) float rows[PANEL * STEPS];
  const long columns = std::min(PANEL, N - n0), whole = up(columns);
  std::fill(rows + columns * STEPS, rows + whole * STEPS, 0.0f);
  for (long i = 0; i < pieces.count(); i++, panel += STEPS * PANEL, scales += PANEL) {
    for (long n = 0; n < columns; n++) widen(b.x + (n0 + n) * b.stride + pieces.from(i), pieces.size(i), rows + n * STEPS);
    if (columns == PANEL && pieces.size(i) == TILE)
      transpose(rows, STEPS, PANEL, STEPS, panel, PANEL);
    else
      transpose(rows, STEPS, whole, up(pieces.steps(i)), panel, PANEL);
    for (long n = 0; n < whole; n++) scales[n] = n < columns ? b.scale(n0 + n, pieces.tile(i)) : 0.0f;
  }
}

// total += sums · scale of the row · scale of the column, for R rows and U vectors.
template <int R, int U>
INLINE void tile(const float *a, long lda, const float *left, const float *b, const float *right, long steps, float *total) {
  V sums[R][U];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) sums[r][u] = V{};
  for (long k = 0; k < steps; k++) {
    V columns[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) columns[u] = load(b + k * PANEL + u * W);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const V row = all(a[r * lda + k]);
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) sums[r][u] = multiply(sums[r][u], row, columns[u]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
      float *to = total + r * PANEL + u * W;
      store(to, load(to) + sums[r][u] * left[r] * load(right + u * W));
    }
}

INLINE void put(float *c, V v, long n) { set(c, get(c, n) + v, n); }
INLINE void put(bf16 *c, V v, long n) { set(c, v, n); }

struct Block {
  const float *a, *left;  // rows [M, count, STEPS] and their scales [count, LEFT]
  const float *panel, *right;
  Pieces pieces;
};

template <int R, int U, class T> INLINE void rows(Block x, T *c, long ldc, long M, long columns) {
  const long count = x.pieces.count(), lda = count * STEPS;
  for (; M >= R; M -= R, x.a += R * lda, x.left += R, c += R * ldc) {
    float total[R * PANEL] = {};
    for (long i = 0; i < count; i++)
      tile<R, U>(x.a + i * STEPS, lda, x.left + i * LEFT, x.panel + i * STEPS * PANEL, x.right + i * PANEL,
                 x.pieces.steps(i), total);
    for (long r = 0; r < R; r++)
      each(columns, [&](long n, long some) { put(c + r * ldc + n, load(total + r * PANEL + n), some); });
  }
  if constexpr (R > 1) {
    if (M) rows<(R + 1) / 2, U>(x, c, ldc, M, columns);
  }
}

// c = a·bᵀ in BF16, or c += a·bᵀ in FP32.
template <class T> void product(long M, long N, Pieces pieces, Operand a, Operand b, T *c, long ldc) {
  const long count = pieces.count(), panels = (N + PANEL - 1) / PANEL;
  Buffer right(panels * PANEL * count * STEPS), right_scales(panels * PANEL * count);
  Buffer left(LEFT * count * STEPS), left_scales(LEFT * count);
  for (long p = 0; p < panels; p++)
    take_panel(b, N, p * PANEL, pieces, right.data() + p * PANEL * count * STEPS, right_scales.data() + p * PANEL * count);
  for (long m = 0; m < M; m += LEFT) {
    const long Mb = std::min(LEFT, M - m);
    for (long r = 0; r < Mb; r++)
      for (long i = 0; i < count; i++) {
        widen(a.x + (m + r) * a.stride + pieces.from(i), pieces.size(i), left.data() + (r * count + i) * STEPS);
        left_scales[i * LEFT + r] = a.scale(m + r, pieces.tile(i));
      }
    for (long p = 0; p < panels; p++) {
      const long columns = std::min(PANEL, N - p * PANEL);
      const Block x{left.data(), left_scales.data(), right.data() + p * PANEL * count * STEPS,
                    right_scales.data() + p * PANEL * count, pieces};
      T *to = c + m * ldc + p * PANEL;
      if (WIDE > 3 && columns > 3 * W)
        rows<REGISTERS / WIDE, WIDE>(x, to, ldc, Mb, columns);
      else if (WIDE > 2 && columns > 2 * W)
        rows<REGISTERS / 3, std::min(3, WIDE)>(x, to, ldc, Mb, columns);
      else if (columns > W)
        rows<REGISTERS / 2, 2>(x, to, ldc, Mb, columns);
      else
        rows<REGISTERS / 2, 1>(x, to, ldc, Mb, columns);
    }
  }
}

// Call f(expert, start, end) for the rows of each group: group g ends at ends[g] and has expert g mod E. If `ends` is
// null, all R rows are one group.
template <class F> INLINE void each_group(long G, const int32_t *ends, long R, long E, F f) {
  for (long g = 0, start = 0; g < G; g++) {
    const long end = ends ? ends[g] : R;
    if (start < end) f(g % E, start, end);
    start = end;
  }
}

// The number of rows to multiply: the rows after them repeat the last one, as padding at the end of a group does.
long distinct(Operand a, long M, long K) {
  const auto repeats = [&](long r) {
    bool same = !memcmp(a.x + r * a.stride, a.x + (r - 1) * a.stride, K);
    for (long t = 0; same && t * TILE < K; t++) same = a.scale(r, t) == a.scale(r - 1, t);
    return same;
  };
  while (M > 1 && repeats(M - 1)) M--;
  return M;
}

void mark_used(Operand x, long rows, long from, long n, uint8_t *used) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < n; i++) used[i] |= x.x[r * x.stride + from + i].bits & 0x7f;
}

// Cut off the columns at the end of the last piece that are zero in both operands (M and N rows), as padding is. At
// least one column stays, for its scales.
Pieces without_zeros(Pieces pieces, Operand a, long M, Operand b, long N) {
  const long last = pieces.count() - 1, from = pieces.from(last);
  uint8_t used[TILE] = {};
  mark_used(a, M, from, pieces.size(last), used);
  mark_used(b, N, from, pieces.size(last), used);
  while (pieces.end > from + 1 && !used[pieces.end - 1 - from]) pieces.end--;
  return pieces;
}

}  // namespace

// y = x·wᵀ for each group; w has one scale per block.
extern "C" void linear_e4m3(long G, const int32_t *ends, long R, long E, long N, long K, const e4m3 *x, long stride,
                            const float *xs, long row_stride, long tile_stride, const e4m3 *w, const float *ws,
                            bf16 *y) {
  const long tiles = (K + TILE - 1) / TILE, tiles_of_w = (N + TILE - 1) / TILE * tiles;
  each_group(G, ends, R, E, [&](long expert, long start, long end) {
    const Operand a{x + start * stride, stride, xs + start * row_stride, row_stride, tile_stride, 1};
    const Operand b{w + expert * N * K, K, ws + expert * tiles_of_w, tiles, 1, TILE};
    const long rows = distinct(a, end - start, K);
    product(rows, N, {0, K}, a, b, y + start * N, N);
    for (long r = start + rows; r < end; r++) std::copy_n(y + (start + rows - 1) * N, N, y + r * N);
  });
}

// acc += dy·xᵀ, summed over the rows of each group, along which both operands are contiguous.
extern "C" void linear_wgrad_e4m3(long G, const int32_t *ends, long R, long E, long N, long K, const e4m3 *dy,
                                  long dy_stride, const float *dys, long dys_row_stride, long dys_tile_stride,
                                  const e4m3 *x, long x_stride, const float *xs, long xs_row_stride,
                                  long xs_tile_stride, float *acc) {
  const Operand a{dy, dy_stride, dys, dys_row_stride, dys_tile_stride, 1};
  const Operand b{x, x_stride, xs, xs_row_stride, xs_tile_stride, 1};
  each_group(G, ends, R, E, [&](long expert, long start, long end) {
    product(N, K, without_zeros({start, end}, a, N, b, K), a, b, acc + expert * N * K, K);
  });
}
