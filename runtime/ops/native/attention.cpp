// Causal softmax attention with rotated heads, forward and backward, sequence by sequence and head by head.
//
// Dao, "FlashAttention-2", 2023; Su et al., "RoFormer", 2021. S positions; a head has C columns of queries and keys and
// D of values, each rounded up to whole vectors (Cp, Dp). Operands are FP32 or BF16, intermediates are FP32.
// Scores are computed for a block of query rows against the keys up to the last of these rows, and stay in the cache.
// If a sequence holds several documents, `starts` has, for each position, the first position of its document: earlier
// keys are masked, and keys before the documents of all rows of a block are not read. A forward may compute only the
// queries from a position on. The bits of a row do not depend on other query rows or on later positions.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "product.h"

namespace {

constexpr long ROWS = 32;            // query rows of a block
constexpr long BLOCK = 64 * 1024;    // most scores of a block

// The buffers of a head. Keys and values are also stored transposed, as vectors over positions. Elements after the last
// column or position are never set, and results computed from them are never read.
struct Head {
  long S, C, D, Cp, Dp, Sp, begin;  // queries start at position `begin`
  const int *starts = nullptr;  // of the current sequence; null if it is one document
  Buffer q, k, kt, v, vt, dout, scores, dq, dk, dv, delta, dscores, out, top, part;

  Head(long S, long C, long D, bool backward, long begin = 0)
      : S(S), C(C), D(D), Cp(up(C)), Dp(up(D)), Sp(up(S)), begin(begin), q((S - begin) * Cp), kt(C * Sp), v(S * Dp),
        scores(block() * Sp) {
    if (backward) {
      k = Buffer(S * Cp), vt = Buffer(D * Sp), dout = Buffer(S * Dp), delta = Buffer(S), dq = Buffer(block() * Cp);
      dscores = Buffer(block() * Sp), dk = Buffer(S * Cp), dv = Buffer(S * Dp);
    } else {
      out = Buffer(block() * Dp), top = Buffer(block()), part = Buffer(block());
    }
  }

  long block() const { return std::max(1L, std::min(ROWS, BLOCK / Sp)); }

  long first(long s) const { return starts ? starts[s] : 0; }

  // The first key that any of these rows sees, rounded down to a whole vector.
  long first(long start, long end) const { return starts ? *std::min_element(starts + start, starts + end) / W * W : 0; }

  // Set the scores of row s to −∞ for keys from `low` to `keys` that it does not see.
  void mask(float *row, long s, long low, long keys) const {
    std::fill(row + low, row + std::max(low, first(s)), -INFINITY);
    std::fill(row + s + 1, row + std::max(s + 1, keys), -INFINITY);
  }
};

// Rotation angles: (cos, sin) [S, n/2] for n columns, by position in the document.
struct Turns {
  const float *angles;
  const int *starts;
  const float *at(long s, long n) const { return angles + (starts ? s - starts[s] : s) * n; }
  Turns from(long s, long n) const { return {angles + s * n, starts}; }  // for rows from s on; only without starts
};

// Widen n columns of S rows, times `scale`.
template <class T> void take(const T *x, long stride, long S, long n, float scale, float *y, long ld) {
  for (long s = 0; s < S; s++, x += stride, y += ld) {
    long i = 0;
    for (; i + W <= n; i += W) store(y + i, load(x + i) * scale);
    for (; i < n; i++) y[i] = wide(x[i]) * scale;
  }
}

template <class T> void give(const float *y, long ld, long S, long n, float scale, T *x, long stride) {
  for (long s = 0; s < S; s++, x += stride, y += ld) {
    long i = 0;
    for (; i + W <= n; i += W) store(x + i, load(y + i) * scale);
    for (; i < n; i++) put(x + i, y[i] * scale);
  }
}

// Rotate pairs by their angles (cos, sin): forwards if sign is 1, backwards if -1.
INLINE V turned(V pairs, V angles, float sign) {
  VI others, even, odd;
  V signs;
  for (int i = 0; i < W; i++) others[i] = i ^ 1, even[i] = i & ~1, odd[i] = i | 1, signs[i] = i & 1 ? sign : -sign;
  const V cos = __builtin_shuffle(angles, even), sin = __builtin_shuffle(angles, odd) * signs;
  return pairs * cos + __builtin_shuffle(pairs, others) * sin;
}

// Like `take`, and rotate each pair of columns by its angle.
template <class T>
void take_turned(const T *x, long stride, long S, long n, Turns turns, float scale, float *y, long ld) {
  for (long s = 0; s < S; s++, x += stride, y += ld) {
    const float *angles = turns.at(s, n);
    long i = 0;
    for (; i + W <= n; i += W) store(y + i, turned(load(x + i) * scale, load(angles + i), 1));
    for (; i < n; i += 2) {
      const float a = wide(x[i]) * scale, b = wide(x[i + 1]) * scale, cos = angles[i], sin = angles[i + 1];
      y[i] = a * cos - b * sin, y[i + 1] = a * sin + b * cos;
    }
  }
}

// Like `give` for `rows` rows from position `start` on, rotated backwards.
template <class T>
void give_turned(const float *y, long ld, long start, long rows, long n, Turns turns, float scale, T *x, long stride) {
  for (long s = start; s < start + rows; s++, x += stride, y += ld) {
    const float *angles = turns.at(s, n);
    long i = 0;
    for (; i + W <= n; i += W) store(x + i, turned(load(y + i) * scale, load(angles + i), -1));
    for (; i < n; i += 2) {
      const float a = y[i] * scale, b = y[i + 1] * scale, cos = angles[i], sin = angles[i + 1];
      put(x + i, a * cos + b * sin), put(x + i + 1, b * cos - a * sin);
    }
  }
}

// h.q (rotated, scaled), h.kt, h.v -> o [queries, D] with row stride `stride`, lse [queries] with stride `lse_step`.
// `peak`, if not null, is raised to the largest score.
template <class T> void forward(Head &h, T *o, long stride, float *lse, long lse_step, float *peak) {
  const long step = h.block();
  for (long start = h.begin; start < h.S; start += step) {
    const long end = std::min(start + step, h.S), keys = up(end), low = h.first(start, end);
    small_product<false>({h.q.data() + (start - h.begin) * h.Cp, h.Cp, 1}, h.kt.data() + low, h.Sp, h.scores.data() + low, h.Sp,
                         end - start, keys - low, h.C);
    for (long s = start; s < end; s++) {
      float *row = h.scores.data() + (s - start) * h.Sp;
      h.mask(row, s, low, keys);
      V most = load(row + low);
      for (long j = low + W; j < keys; j += W) most = larger(load(row + j), most);
      h.top[s - start] = largest(most);
    }
    if (peak) *peak = std::max(*peak, *std::max_element(h.top.data(), h.top.data() + (end - start)));
    for (long s = start; s < end; s++) {
      float *row = h.scores.data() + (s - start) * h.Sp;
      const float top = h.top[s - start];
      V total = {};
      for (long j = low; j < keys; j += W) {
        const V weight = exp(load(row + j) - top);
        store(row + j, weight), total += weight;
      }
      const float weights = sum(total);
      lse[(s - h.begin) * lse_step] = top + std::log(weights), h.part[s - start] = 1 / weights;
    }
    small_product<false>({h.scores.data() + low, h.Sp, 1}, h.v.data() + low * h.Dp, h.Dp, h.out.data(), h.Dp, end - start,
                         h.Dp, end - low);
    for (long s = start; s < end; s++)
      give(h.out.data() + (s - start) * h.Dp, h.Dp, 1, h.D, h.part[s - start], o + (s - h.begin) * stride, stride);
  }
}

// h.q, h.k, h.kt, h.vt, h.dout, h.delta -> adds to h.dk and h.dv; `give_dq(start, rows)` stores h.dq of a block.
template <class Give> void backward(Head &h, const float *lse, long lse_step, Give give_dq) {
  const long step = h.block();
  for (long start = 0; start < h.S; start += step) {
    const long end = std::min(start + step, h.S), rows = end - start, keys = up(end), low = h.first(start, end);
    const float *q = h.q.data() + start * h.Cp, *dout = h.dout.data() + start * h.Dp;
    float *scores = h.scores.data() + low, *dscores = h.dscores.data() + low;
    small_product<false>({q, h.Cp, 1}, h.kt.data() + low, h.Sp, scores, h.Sp, rows, keys - low, h.C);
    small_product<false>({dout, h.Dp, 1}, h.vt.data() + low, h.Sp, dscores, h.Sp, rows, keys - low, h.D);
    for (long s = start; s < end; s++) {
      float *row = h.scores.data() + (s - start) * h.Sp, *drow = h.dscores.data() + (s - start) * h.Sp;
      h.mask(row, s, low, keys);
      const float log_sum = lse[s * lse_step], delta = h.delta[s];
      for (long j = low; j < keys; j += W) {
        const V weight = exp(load(row + j) - log_sum);
        store(row + j, weight), store(drow + j, (load(drow + j) - delta) * weight);
      }
    }
    small_product<false>({dscores, h.Sp, 1}, h.k.data() + low * h.Cp, h.Cp, h.dq.data(), h.Cp, rows, h.Cp, end - low);
    small_product<true>({dscores, 1, h.Sp}, q, h.Cp, h.dk.data() + low * h.Cp, h.Cp, end - low, h.Cp, rows);
    small_product<true>({scores, 1, h.Sp}, dout, h.Dp, h.dv.data() + low * h.Dp, h.Dp, end - low, h.Dp, rows);
    give_dq(start, rows);
  }
}

// Set h.dout and h.delta from the gradient and the result of a head.
template <class T> void take_dout(Head &h, const T *dout, const T *o, long stride) {
  take(dout, stride, h.S, h.D, 1, h.dout.data(), h.Dp);
  for (long s = 0; s < h.S; s++) {
    const float *d = h.dout.data() + s * h.Dp;
    V dots = {};
    each(h.D, [&](long i, long n) { dots += get(d + i, n) * get(o + s * stride + i, n); });
    h.delta[s] = sum(dots);
  }
}

// H heads of [nope | rope] columns, which share the rope part of the keys.
struct Mla {
  long B, S, H, nope, rope, value, q_stride, kv_stride, kr_stride;
  const int *starts;  // [B, S], or null; with starts, `begin` is 0
  long begin = 0;
  long queries() const { return S - begin; }
  long C() const { return nope + rope; }
  float scale() const { return 1 / std::sqrt(float(C())); }
};

// Load the queries, keys and values of head n of sequence b.
template <class T>
void take_mla(Head &h, const Mla &m, long b, long n, const T *q, const T *kv, const Buffer &rope_key,
              Turns turns, float *k) {
  q += b * m.queries() * m.q_stride + n * m.C(), kv += b * m.S * m.kv_stride + n * (m.nope + m.value);
  take(q, m.q_stride, m.queries(), m.nope, m.scale(), h.q.data(), h.Cp);
  const Turns of_queries = turns.from(m.begin, m.rope);
  take_turned(q + m.nope, m.q_stride, m.queries(), m.rope, of_queries, m.scale(), h.q.data() + m.nope, h.Cp);
  take(kv, m.kv_stride, m.S, m.nope, 1, k, h.Cp);
  take(rope_key.data(), m.rope, m.S, m.rope, 1, k + m.nope, h.Cp);
  take(kv + m.nope, m.kv_stride, m.S, m.value, 1, h.v.data(), h.Dp);
  transpose(k, h.Cp, m.S, h.C, h.kt.data(), h.Sp);
}

template <class T>
void mla(const Mla &m, const T *q, const T *kv, const T *k_rope, const float *angles, T *o, float *lse, float *peaks) {
  Head h(m.S, m.C(), m.value, false, m.begin);
  Buffer rope_key(m.S * m.rope), k(m.S * h.Cp);
  for (long b = 0; b < m.B; b++) {
    h.starts = m.starts ? m.starts + b * m.S : nullptr;
    const Turns turns{angles, h.starts};
    take_turned(k_rope + b * m.S * m.kr_stride, m.kr_stride, m.S, m.rope, turns, 1, rope_key.data(), m.rope);
    for (long n = 0; n < m.H; n++) {
      take_mla(h, m, b, n, q, kv, rope_key, turns, k.data());
      forward(h, o + (b * m.queries() * m.H + n) * m.value, m.H * m.value, lse + (b * m.H + n) * m.queries(), 1,
              peaks ? peaks + n : nullptr);
    }
  }
}

template <class T>
void mla_dgrad(const Mla &m, const T *dout, const T *q, const T *kv, const T *k_rope, const T *o, const float *lse,
               const float *angles, T *dq, T *dkv, T *dk_rope) {
  Head h(m.S, m.C(), m.value, true);
  Buffer rope_key(m.S * m.rope), drope_key(m.S * m.rope);
  const long width = m.H * m.C(), kv_head = m.nope + m.value, kv_width = m.H * kv_head, o_width = m.H * m.value;
  for (long b = 0; b < m.B; b++) {
    h.starts = m.starts ? m.starts + b * m.S : nullptr;
    const Turns turns{angles, h.starts};
    take_turned(k_rope + b * m.S * m.kr_stride, m.kr_stride, m.S, m.rope, turns, 1, rope_key.data(), m.rope);
    drope_key.zero();
    for (long n = 0; n < m.H; n++) {
      take_mla(h, m, b, n, q, kv, rope_key, turns, h.k.data());
      transpose(h.v.data(), h.Dp, m.S, h.D, h.vt.data(), h.Sp);
      const long at = b * m.S * o_width + n * m.value;
      take_dout(h, dout + at, o + at, o_width);
      h.dk.zero(), h.dv.zero();
      T *dq_head = dq + b * m.S * width + n * m.C(), *dkv_head = dkv + b * m.S * kv_width + n * kv_head;
      backward(h, lse + (b * m.H + n) * m.S, 1, [&](long start, long rows) {
        T *to = dq_head + start * width;
        give(h.dq.data(), h.Cp, rows, m.nope, m.scale(), to, width);
        give_turned(h.dq.data() + m.nope, h.Cp, start, rows, m.rope, turns, m.scale(), to + m.nope, width);
      });
      give(h.dk.data(), h.Cp, m.S, m.nope, 1, dkv_head, kv_width);
      give(h.dv.data(), h.Dp, m.S, m.value, 1, dkv_head + m.nope, kv_width);
      for (long s = 0; s < m.S; s++)
        for (long i = 0; i < m.rope; i++) drope_key[s * m.rope + i] += h.dk[s * h.Cp + m.nope + i];
    }
    give_turned(drope_key.data(), m.rope, 0, m.S, m.rope, turns, 1, dk_rope + b * m.S * m.rope, m.rope);
  }
}

// H query heads of C columns, all rotated; H/G of them share a head of keys and values.
struct Gqa {
  long B, S, H, G, C, q_stride, k_stride, v_stride;
  const int *starts;  // [B, S], or null; with starts, `begin` is 0
  long begin = 0;
  long queries() const { return S - begin; }
  float scale() const { return 1 / std::sqrt(float(C)); }
};

// Load the keys and values of group g of sequence b.
template <class T>
void take_group(Head &h, const Gqa &m, long b, long g, const T *k, const T *v, Turns turns, float *key) {
  take_turned(k + b * m.S * m.k_stride + g * m.C, m.k_stride, m.S, m.C, turns, 1, key, h.Cp);
  take(v + b * m.S * m.v_stride + g * m.C, m.v_stride, m.S, m.C, 1, h.v.data(), h.Dp);
  transpose(key, h.Cp, m.S, m.C, h.kt.data(), h.Sp);
}

template <class T>
void gqa(const Gqa &m, const T *q, const T *k, const T *v, const float *angles, T *o, float *lse, float *peaks) {
  Head h(m.S, m.C, m.C, false, m.begin);
  Buffer key(m.S * h.Cp);
  const long share = m.H / m.G;
  for (long b = 0; b < m.B; b++)
    for (long g = 0; g < m.G; g++) {
      h.starts = m.starts ? m.starts + b * m.S : nullptr;
      const Turns turns{angles, h.starts};
      take_group(h, m, b, g, k, v, turns, key.data());
      for (long r = 0; r < share; r++) {
        const long n = g * share + r;
        take_turned(q + b * m.queries() * m.q_stride + n * m.C, m.q_stride, m.queries(), m.C, turns.from(m.begin, m.C),
                    m.scale(), h.q.data(), h.Cp);
        forward(h, o + (b * m.queries() * m.H + n) * m.C, m.H * m.C, lse + (b * m.G + g) * m.queries() * share + r, share,
                peaks ? peaks + n : nullptr);
      }
    }
}

template <class T>
void gqa_dgrad(const Gqa &m, const T *dout, const T *q, const T *k, const T *v, const T *o, const float *lse,
               const float *angles, T *dq, T *dk, T *dv) {
  Head h(m.S, m.C, m.C, true);
  const long share = m.H / m.G, width = m.H * m.C, shared_width = m.G * m.C;
  for (long b = 0; b < m.B; b++)
    for (long g = 0; g < m.G; g++) {
      h.starts = m.starts ? m.starts + b * m.S : nullptr;
      const Turns turns{angles, h.starts};
      take_group(h, m, b, g, k, v, turns, h.k.data());
      transpose(h.v.data(), h.Dp, m.S, m.C, h.vt.data(), h.Sp);
      h.dk.zero(), h.dv.zero();
      for (long r = 0; r < share; r++) {
        const long n = g * share + r, at = b * m.S * width + n * m.C;
        take_turned(q + b * m.S * m.q_stride + n * m.C, m.q_stride, m.S, m.C, turns, m.scale(), h.q.data(), h.Cp);
        take_dout(h, dout + at, o + at, width);
        backward(h, lse + (b * m.G + g) * m.S * share + r, share, [&](long start, long rows) {
          give_turned(h.dq.data(), h.Cp, start, rows, m.C, turns, m.scale(), dq + at + start * width, width);
        });
      }
      const long at = b * m.S * shared_width + g * m.C;
      give_turned(h.dk.data(), h.Cp, 0, m.S, m.C, turns, 1, dk + at, shared_width);
      give(h.dv.data(), h.Dp, m.S, m.C, 1, dv + at, shared_width);
    }
}

}  // namespace

#define ATTENTION(T, suffix)                                                                                           \
  extern "C" void mla_attention_##suffix(long B, long S, long begin, long H, long nope, long rope, long value,         \
                                         const T *q, long q_stride, const T *kv, long kv_stride, const T *k_rope,      \
                                         long kr_stride, const float *angles, const int *starts, T *o, float *lse,     \
                                         float *peaks) {                                                               \
    mla({B, S, H, nope, rope, value, q_stride, kv_stride, kr_stride, starts, begin}, q, kv, k_rope, angles, o, lse,    \
        peaks);                                                                                                        \
  }                                                                                                                    \
  extern "C" void mla_attention_dgrad_##suffix(long B, long S, long H, long nope, long rope, long value,               \
                                               const T *dout, const T *q, long q_stride, const T *kv, long kv_stride,  \
                                               const T *k_rope, long kr_stride, const T *o, const float *lse,          \
                                               const float *angles, const int *starts, T *dq, T *dkv, T *dk_rope) {    \
    mla_dgrad({B, S, H, nope, rope, value, q_stride, kv_stride, kr_stride, starts}, dout, q, kv, k_rope, o, lse,       \
              angles, dq, dkv, dk_rope);                                                                               \
  }                                                                                                                    \
  extern "C" void gqa_attention_##suffix(long B, long S, long begin, long H, long G, long C, const T *q,               \
                                         long q_stride, const T *k, long k_stride, const T *v, long v_stride,          \
                                         const float *angles, const int *starts, T *o, float *lse, float *peaks) {     \
    gqa({B, S, H, G, C, q_stride, k_stride, v_stride, starts, begin}, q, k, v, angles, o, lse, peaks);                 \
  }                                                                                                                    \
  extern "C" void gqa_attention_dgrad_##suffix(long B, long S, long H, long G, long C, const T *dout, const T *q,      \
                                               long q_stride, const T *k, long k_stride, const T *v, long v_stride,    \
                                               const T *o, const float *lse, const float *angles, const int *starts,   \
                                               T *dq, T *dk, T *dv) {                                                  \
    gqa_dgrad({B, S, H, G, C, q_stride, k_stride, v_stride, starts}, dout, q, k, v, o, lse, angles, dq, dk, dv);       \
  }
ATTENTION(float, float32)
ATTENTION(bf16, bfloat16)
