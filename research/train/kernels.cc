// Forward and backward of what a small model spends its training on, for one core: causal attention behind rotary
// embedding, RMSNorm behind a residual sum, SwiGLU, and cross entropy in the place of its logits.
// Products take bfloat16 and sum in float32. Every array is dense and row-major; fast.py makes them and checks shapes.
#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long kTile = 64;  // queries that are taken at once

// e^x to float32's precision; below -87 it stays at its value there. A NaN stays one: `max` returns its second operand.
Vec exponential(Vec x) {
  x = larger(all(-87.f), x);
  Vec n = nearest(mul(x, all(1.44269504f)));
  Vec r = fnma(n, all(0.693359375f), x);
  r = fnma(n, all(-2.12194440e-4f), r);
  Vec sum = all(1.f / 720);
  for (float term : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) sum = fma(sum, r, all(term));
  return times_power(sum, n);
}

Vec sigmoid(Vec x) {
  Vec inner = smaller(all(80.f), sub(all(0), x));
  return divide(all(1.f), add(all(1.f), exponential(inner)));
}

// c[Rows, 16 Vecs] (+)= sum over p of a(m, p) b(p, n), whose elements are pairs; a has strides for both axes.
template <int Rows, int Vecs, bool Add>
void block(const Pair* a, long row, long step, const Pair* b, long b_row, float* c, long c_row, long pairs) {
  Vec sum[Rows][Vecs];
  for (int m = 0; m < Rows; m++)
    for (int v = 0; v < Vecs; v++) sum[m][v] = Add ? load(c + m * c_row + 16 * v) : all(0);
  for (long p = 0; p < pairs; p++) {
    Right right[Vecs];
    for (int v = 0; v < Vecs; v++) right[v] = right_of(load_pairs(b + p * b_row + 16 * v));
    for (int m = 0; m < Rows; m++) {
      Left left = left_of(a + m * row + p * step);
      for (int v = 0; v < Vecs; v++) sum[m][v] = multiplied(sum[m][v], left, right[v]);
    }
  }
  for (int m = 0; m < Rows; m++)
    for (int v = 0; v < Vecs; v++) store(c + m * c_row + 16 * v, sum[m][v]);
}

// The product [rows, columns] of the same; 8 divides the rows, and 32 the columns.
template <bool Add>
void multiply(long rows, long columns, const Pair* a, long row, long step, const Pair* b, long b_row, float* c,
              long c_row, long pairs) {
  if (kRegisters < 32) {
    for (long n = 0; n < columns; n += 16)
      for (long m = 0; m < rows; m += 4)
        block<4, 1, Add>(a + m * row, row, step, b + n, b_row, c + m * c_row + n, c_row, pairs);
  } else if (columns % 64 == 0) {
    for (long n = 0; n < columns; n += 64)
      for (long m = 0; m < rows; m += 4)
        block<4, 4, Add>(a + m * row, row, step, b + n, b_row, c + m * c_row + n, c_row, pairs);
  } else {
    for (long n = 0; n < columns; n += 32)
      for (long m = 0; m < rows; m += 8)
        block<8, 2, Add>(a + m * row, row, step, b + n, b_row, c + m * c_row + n, c_row, pairs);
  }
}

// Rows 2p and 2p + 1 of x [rows, width] as pairs [rows / 2, width].
void pair_rows(const bf16* x, long rows, long width, Pair* out) {
  for (long p = 0; p < rows / 2; p++)
    for (long c = 0; c < width; c += 16) {
      const bf16* at = x + 2 * p * width + c;
      Narrow low = load_narrow(at), high = load_narrow(at + width);
      store_pairs(out + p * width + c, paired(low, high));
    }
}

// x [rows, width] as pairs of channels, transposed: [width / 2, rows].
void pair_channels(const bf16* x, long rows, long width, Pair* out) {
  const Pair* pairs = (const Pair*)x;
  for (long p = 0; p < width / 2; p++)
    for (long j = 0; j < rows; j++) out[p * rows + j] = pairs[j * (width / 2) + p];
}

// How an attention's projections [length, channels] of one sequence are laid out.
struct Layout {
  long batch, length, channels;
  long heads, key_heads, value_heads;  // heads counts those of both maps' queries
  long width, value_width;
  float scale;
  const long *query_at, *key_at, *value_at;  // first channel of each head
  const long *key_of, *value_of;             // key and value head that each query head reads
  long padded() const { return (length + kTile - 1) / kTile * kTile; }
};

// A head [length, width] out of the projections, turned by the rotary embedding; rows behind the length stay zero.
void rotated_head(const Layout& of, const bf16* x, const float* cosine, const float* sine, bf16* out) {
  long half = of.width / 2;
  for (long t = 0; t < of.length; t++)
    for (long i = 0; i < half; i += 16) {
      Vec a = load(x + t * of.channels + i), b = load(x + t * of.channels + half + i);
      Vec c = load(cosine + t * half + i), s = load(sine + t * half + i);
      store(out + t * of.width + i, fnma(b, s, mul(a, c)));
      store(out + t * of.width + half + i, fma(a, s, mul(b, c)));
    }
}

// The gradient of what `rotated_head` read, from that of what it wrote.
void turned_back(const Layout& of, const float* x, const float* cosine, const float* sine, bf16* out) {
  long half = of.width / 2;
  for (long t = 0; t < of.length; t++)
    for (long i = 0; i < half; i += 16) {
      Vec a = load(x + t * of.width + i), b = load(x + t * of.width + half + i);
      Vec c = load(cosine + t * half + i), s = load(sine + t * half + i);
      store(out + t * of.channels + i, fma(b, s, mul(a, c)));
      store(out + t * of.channels + half + i, fnma(a, s, mul(b, c)));
    }
}

void copy_rows(const bf16* x, long from, long rows, long width, bf16* out) {
  for (long t = 0; t < rows; t++) memcpy(out + t * width, x + t * from, width * sizeof(bf16));
}

// Numerators of a query's probabilities over `seen` keys, zero up to `end`. Returns their sum; `top` becomes the
// largest logit.
float numerators(const float* products, float scale, long seen, long end, bf16* out, float* top) {
  Vec tops = all(-INFINITY), sum = all(0);
  for (long j = 0; j < seen; j += 16) tops = larger(tops, kept(load(products + j), seen - j, -INFINITY));
  *top = largest(tops) * scale;
  for (long j = 0; j < end; j += 16) {
    Vec x = fms(load(products + j), all(scale), all(*top));
    Vec e = j < seen ? kept(exponential(x), seen - j) : all(0);
    sum = add(sum, e);
    store(out + j, e);
  }
  return summed(sum);
}

float dot(const bf16* a, const bf16* b, long width) {
  Vec sum = all(0);
  for (long n = 0; n < width; n += 16) sum = fma(load(a + n), load(b + n), sum);
  return summed(sum);
}

template <class T>
using Array = std::vector<T>;

}  // namespace

extern "C" {

// out [batch, length, heads, value_width]; log_sums [batch, heads, padded length], for the backward pass.
void attention_forward(const Layout* layout, const bf16* projections, const float* cosine, const float* sine, bf16* out,
                       float* log_sums) {
  const Layout& of = *layout;
  long T = of.padded(), d = of.width, dv = of.value_width;
  Array<bf16> head(T * d), values(T * dv), query(T * d), weights(kTile * T);
  Array<Pair> keys(of.key_heads * T * d / 2), value_pairs(of.value_heads * T * dv / 2);
  Array<float> products(kTile * T), sums(kTile * dv);
  for (long b = 0; b < of.batch; b++) {
    const bf16* x = projections + b * of.length * of.channels;
    for (long h = 0; h < of.key_heads; h++) {
      rotated_head(of, x + of.key_at[h], cosine, sine, head.data());
      pair_channels(head.data(), T, d, keys.data() + h * T * d / 2);
    }
    for (long h = 0; h < of.value_heads; h++) {
      copy_rows(x + of.value_at[h], of.channels, of.length, dv, values.data());
      pair_rows(values.data(), T, dv, value_pairs.data() + h * T * dv / 2);
    }
    for (long h = 0; h < of.heads; h++) {
      rotated_head(of, x + of.query_at[h], cosine, sine, query.data());
      const Pair* key = keys.data() + of.key_of[h] * T * d / 2;
      const Pair* value = value_pairs.data() + of.value_of[h] * T * dv / 2;
      for (long start = 0; start < T; start += kTile) {
        long end = start + kTile;
        float sum[kTile];
        multiply<false>(kTile, end, (const Pair*)(query.data() + start * d), d / 2, 1, key, T, products.data(), T,
                        d / 2);
        for (long r = 0; r < kTile; r++) {
          float top;
          sum[r] = numerators(products.data() + r * T, of.scale, start + r + 1, end, weights.data() + r * T, &top);
          log_sums[(b * of.heads + h) * T + start + r] = top + std::log(sum[r]);
        }
        multiply<false>(kTile, dv, (const Pair*)weights.data(), T / 2, 1, value, dv, sums.data(), dv, end / 2);
        for (long r = 0; r < kTile && start + r < of.length; r++) {
          bf16* row = out + ((b * of.length + start + r) * of.heads + h) * dv;
          for (long n = 0; n < dv; n += 16)
            store(row + n, mul(load(sums.data() + r * dv + n), all(1 / sum[r])));
        }
      }
    }
  }
}

// gradient [batch, length, channels] of the projections, from that of `out`.
void attention_backward(const Layout* layout, const bf16* out_gradient, const bf16* out, const float* log_sums,
                        const bf16* projections, const float* cosine, const float* sine, bf16* gradient) {
  const Layout& of = *layout;
  long T = of.padded(), d = of.width, dv = of.value_width;
  Array<bf16> head(T * d), values(T * dv), query(T * d), upper(T * dv), logit_rows(kTile * T);
  Array<Pair> key_channels(of.key_heads * T * d / 2), key_rows(of.key_heads * T * d / 2);
  Array<Pair> value_channels(of.value_heads * T * dv / 2), query_rows(kTile * d / 2), upper_rows(kTile * dv / 2);
  Array<Pair> logit_pairs(kTile / 2 * T), weight_pairs(kTile / 2 * T);
  Array<float> products(kTile * T), weight_gradient(kTile * T), query_gradient(T * d);
  Array<float> key_gradient(of.key_heads * T * d), value_gradient(of.value_heads * T * dv);
  for (long b = 0; b < of.batch; b++) {
    const bf16* x = projections + b * of.length * of.channels;
    bf16* g = gradient + b * of.length * of.channels;
    for (long h = 0; h < of.key_heads; h++) {
      rotated_head(of, x + of.key_at[h], cosine, sine, head.data());
      pair_channels(head.data(), T, d, key_channels.data() + h * T * d / 2);
      pair_rows(head.data(), T, d, key_rows.data() + h * T * d / 2);
    }
    for (long h = 0; h < of.value_heads; h++) {
      copy_rows(x + of.value_at[h], of.channels, of.length, dv, values.data());
      pair_channels(values.data(), T, dv, value_channels.data() + h * T * dv / 2);
    }
    key_gradient.assign(key_gradient.size(), 0.f);
    value_gradient.assign(value_gradient.size(), 0.f);
    for (long h = 0; h < of.heads; h++) {
      rotated_head(of, x + of.query_at[h], cosine, sine, query.data());
      copy_rows(out_gradient + (b * of.length * of.heads + h) * dv, of.heads * dv, of.length, dv, upper.data());
      long key = of.key_of[h] * T * d, value = of.value_of[h] * T * dv;
      for (long start = 0; start < T; start += kTile) {
        long end = start + kTile;
        multiply<false>(kTile, end, (const Pair*)(query.data() + start * d), d / 2, 1, key_channels.data() + key / 2, T,
                        products.data(), T, d / 2);
        multiply<false>(kTile, end, (const Pair*)(upper.data() + start * dv), dv / 2, 1,
                        value_channels.data() + value / 2, T, weight_gradient.data(), T, dv / 2);
        for (long r = 0; r < kTile; r++) {
          long t = start + r;
          // The mean of the weights' gradients under the weights; rows behind the length have no gradient.
          float mean = t < of.length ? dot(upper.data() + t * dv, out + ((b * of.length + t) * of.heads + h) * dv, dv)
                                     : 0.f;
          float log_sum = log_sums[(b * of.heads + h) * T + t];
          for (long j = 0; j < end; j += 16) {
            float* p = products.data() + r * T + j;
            float* w = weight_gradient.data() + r * T + j;
            Vec weight = kept(exponential(fms(load(p), all(of.scale), all(log_sum))), t + 1 - j);
            Vec logit = mul(mul(weight, all(of.scale)), sub(load(w), all(mean)));
            store(p, weight);
            store(w, logit);
            store(logit_rows.data() + r * T + j, logit);
          }
        }
        for (long r = 0; r < kTile; r += 2)
          for (long j = 0; j < end; j += 16) {
            const float *p = products.data() + r * T + j, *w = weight_gradient.data() + r * T + j;
            store_pairs(weight_pairs.data() + r / 2 * T + j, paired(narrowed(load(p)), narrowed(load(p + T))));
            store_pairs(logit_pairs.data() + r / 2 * T + j, paired(narrowed(load(w)), narrowed(load(w + T))));
          }
        pair_rows(query.data() + start * d, kTile, d, query_rows.data());
        pair_rows(upper.data() + start * dv, kTile, dv, upper_rows.data());
        multiply<false>(kTile, d, (const Pair*)logit_rows.data(), T / 2, 1, key_rows.data() + key / 2, d,
                        query_gradient.data() + start * d, d, end / 2);
        multiply<true>(end, d, logit_pairs.data(), 1, T, query_rows.data(), d, key_gradient.data() + key, d, kTile / 2);
        multiply<true>(end, dv, weight_pairs.data(), 1, T, upper_rows.data(), dv, value_gradient.data() + value, dv,
                       kTile / 2);
      }
      turned_back(of, query_gradient.data(), cosine, sine, g + of.query_at[h]);
    }
    for (long h = 0; h < of.key_heads; h++)
      turned_back(of, key_gradient.data() + h * T * d, cosine, sine, g + of.key_at[h]);
    for (long h = 0; h < of.value_heads; h++)
      for (long t = 0; t < of.length; t++)
        for (long n = 0; n < dv; n += 16)
          store(g + t * of.channels + of.value_at[h] + n, load(value_gradient.data() + (h * T + t) * dv + n));
  }
}

// sum = x + added (x itself where nothing is added), out = weight · sum / rms(sum), inverse [rows] = 1 / rms(sum).
void norm_forward(long rows, long width, float epsilon, const float* x, const bf16* added, const float* weight,
                  float* sum, bf16* out, float* inverse) {
  for (long t = 0; t < rows; t++) {
    const float* row = x + t * width;
    Vec squares = all(0);
    for (long i = 0; i < width; i += 16) {
      Vec e = load(row + i);
      if (added) store(sum + t * width + i, e = add(e, load(added + t * width + i)));
      squares = fma(e, e, squares);
    }
    if (added) row = sum + t * width;
    inverse[t] = 1 / std::sqrt(summed(squares) / width + epsilon);
    for (long i = 0; i < width; i += 16)
      store(out + t * width + i, mul(mul(load(row + i), all(inverse[t])), load(weight + i)));
  }
}

// gradient of the sum, float32 and, where `narrow` is given, bfloat16 too, and of the weight, which is added to.
void norm_backward(long rows, long width, const float* sum_gradient, const bf16* out_gradient, const float* sum,
                   const float* weight, const float* inverse, float* gradient, bf16* narrow, float* weight_gradient) {
  for (long t = 0; t < rows; t++) {
    const bf16* upper = out_gradient + t * width;
    Vec scale = all(inverse[t]), along = all(0);
    for (long i = 0; i < width; i += 16) {
      Vec unit = mul(load(sum + t * width + i), scale), g = load(upper + i);
      store(weight_gradient + i, fma(g, unit, load(weight_gradient + i)));
      along = fma(mul(g, load(weight + i)), unit, along);
    }
    Vec mean = all(summed(along) / width);
    for (long i = 0; i < width; i += 16) {
      Vec unit = mul(load(sum + t * width + i), scale);
      Vec g = mul(load(upper + i), load(weight + i));
      Vec e = mul(scale, fnma(unit, mean, g));
      if (sum_gradient) e = add(e, load(sum_gradient + t * width + i));
      store(gradient + t * width + i, e);
      if (narrow) store(narrow + t * width + i, e);
    }
  }
}

// out [rows, inner] = silu(gate) · up of [rows, 2 inner], gate first.
void swiglu_forward(long rows, long inner, const bf16* gate_up, bf16* out) {
  for (long t = 0; t < rows; t++)
    for (long i = 0; i < inner; i += 16) {
      long some = inner - i;
      const bf16* at = gate_up + 2 * t * inner + i;
      Vec gate = load(at, some), up = load(at + inner, some);
      store(out + t * inner + i, mul(mul(gate, sigmoid(gate)), up), some);
    }
}

void swiglu_backward(long rows, long inner, const bf16* out_gradient, const bf16* gate_up, bf16* gradient) {
  for (long t = 0; t < rows; t++)
    for (long i = 0; i < inner; i += 16) {
      long some = inner - i;
      const bf16* at = gate_up + 2 * t * inner + i;
      Vec gate = load(at, some), up = load(at + inner, some), upper = load(out_gradient + t * inner + i, some);
      Vec share = sigmoid(gate), silu = mul(gate, share);
      Vec slope = fma(silu, sub(all(1.f), share), share);
      store(gradient + 2 * t * inner + i, mul(mul(upper, up), slope), some);
      store(gradient + 2 * t * inner + inner + i, mul(upper, silu), some);
    }
}

// Weighted cross entropy of logits [rows, vocabulary], which become its gradient: weight · (softmax - one hot).
double cross_entropy(long rows, long vocabulary, bf16* logits, const int64_t* targets, const float* weights) {
  Array<float> row(vocabulary);
  double loss = 0;
  for (long t = 0; t < rows; t++) {
    bf16* at = logits + t * vocabulary;
    Vec tops = all(-INFINITY), sum = all(0);
    for (long i = 0; i < vocabulary; i += 16) tops = larger(tops, load(at + i));
    float top = largest(tops);
    uint32_t bits = (uint32_t)at[targets[t]] << 16;
    float target;
    memcpy(&target, &bits, sizeof target);
    for (long i = 0; i < vocabulary; i += 16) {
      Vec e = exponential(sub(load(at + i), all(top)));
      sum = add(sum, e);
      store(row.data() + i, e);
    }
    float total = summed(sum);
    loss += weights[t] * (top + std::log(total) - target);
    row[targets[t]] -= total;
    for (long i = 0; i < vocabulary; i += 16)
      store(at + i, mul(load(row.data() + i), all(weights[t] / total)));
  }
  return loss;
}
}
