/**
 * Attention maps from queries, keys and λ, with logits rounded to low bits before each softmax.
 *
 * signal = gate · softmax(Q1·K1ᵀ·scale), noise = softmax(Q2·K2ᵀ·scale), difference = signal - λ · noise, all in float64.
 * Heads, key rows and rounding are those of docs/differential-attention-op.md; the rounding is dynamic absmax (arXiv
 * 2410.05258, section 3.7).
 */

/**
 * Logits of both maps of every pair in one layer, [T, T] row by row; a key behind the query has 0.
 *
 * @param {object} about Contents of web.json.
 * @param {import("./model.js").LayerReading} layer
 * @returns {{signal: Float64Array[], noise: Float64Array[]}} By pair.
 */
export function layerLogits(about, layer) {
  const { num_pairs: pairs, num_kv_pairs: kvPairs, signals_per_noise: sharing, shares_keys: isShared } = about;
  const noiseOffset = isShared ? 0 : about.head_dim;
  const logits = { signal: [], noise: [] };
  for (let pair = 0; pair < pairs; pair++) {
    const group = Math.floor(pair / sharing) * (sharing + 1);
    const kvPair = Math.floor(pair / (pairs / kvPairs));
    logits.signal.push(headLogits(about, layer, group + (pair % sharing), kvPair, 0));
    logits.noise.push(headLogits(about, layer, group + sharing, kvPair, noiseOffset));
  }
  return logits;
}

/**
 * Both maps of a pair and their difference.
 *
 * @param {object} about Contents of web.json.
 * @param {import("./model.js").LayerReading} layer
 * @param {ReturnType<typeof layerLogits>} logits Those of the layer.
 * @param {number} pair
 * @param {number} bits Bits of the logits; 16 rounds nothing.
 * @param {"row" | "tensor"} granularity What shares a scale: a query of a map, or the whole layer.
 * @returns {{length: number, signal: Float64Array, noise: Float64Array, difference: Float64Array, lambda: Float64Array}}
 *   Maps [T, T] row by row, and λ [T].
 */
export function pairMaps(about, layer, logits, pair, bits, granularity) {
  const length = Math.sqrt(logits.signal[0].length);
  const shared = granularity === "tensor" ? largest([...logits.signal, ...logits.noise].map((map) => largest(map))) : null;
  const signal = softmax(rounded(logits.signal[pair], length, bits, shared), length);
  const noise = softmax(rounded(logits.noise[pair], length, bits, shared), length);
  const lambda = byToken(layer.lambda, about, length, pair);
  const gate = layer.signalGate ? byToken(layer.signalGate, about, length, pair) : new Float64Array(length).fill(1);
  const difference = new Float64Array(length * length);
  for (let i = 0; i < difference.length; i++) {
    const query = Math.floor(i / length);
    signal[i] *= gate[query];
    difference[i] = signal[i] - lambda[query] * noise[i];
  }
  return { length, signal, noise, difference, lambda };
}

/** Share by which a map differs from another: the sum of |a - b| over that of |b|. */
export function change(map, reference) {
  let moved = 0;
  let whole = 0;
  for (let i = 0; i < map.length; i++) {
    moved += Math.abs(map[i] - reference[i]);
    whole += Math.abs(reference[i]);
  }
  return whole ? moved / whole : 0;
}

function headLogits({ head_dim: width, num_pairs: pairs, signals_per_noise: sharing, shares_keys: isShared, scale }, layer, head, kvPair, offset) {
  const queryRow = (pairs + pairs / sharing) * width;
  const keyRow = isShared ? width : 2 * width;
  const length = layer.query.length / queryRow;
  const logits = new Float64Array(length * length);
  for (let t = 0; t < length; t++) {
    const query = t * queryRow + head * width;
    for (let s = 0; s <= t; s++) {
      const key = (kvPair * length + s) * keyRow + offset;
      let product = 0;
      for (let i = 0; i < width; i++) product += layer.query[query + i] * layer.key[key + i];
      logits[t * length + s] = product * scale;
    }
  }
  return logits;
}

/** Logits rounded to multiples of largest / (2^(bits-1) - 1), where `shared` is the largest, or each row's own is. */
function rounded(logits, length, bits, shared) {
  if (bits === 16) return logits;
  const result = new Float64Array(logits.length);
  for (let t = 0; t < length; t++) {
    const row = logits.subarray(t * length, t * length + t + 1);
    const scale = (shared ?? largest(row)) / (2 ** (bits - 1) - 1) || 1;
    row.forEach((logit, s) => (result[t * length + s] = roundHalfEven(logit / scale) * scale));
  }
  return result;
}

/** Softmax of each row over the keys that its query sees. */
function softmax(logits, length) {
  const weights = new Float64Array(logits.length);
  for (let t = 0; t < length; t++) {
    const start = t * length;
    const row = logits.subarray(start, start + t + 1);
    const top = row.reduce((most, logit) => Math.max(most, logit), -Infinity);
    let sum = 0;
    row.forEach((logit, s) => (sum += weights[start + s] = Math.exp(logit - top)));
    for (let s = 0; s <= t; s++) weights[start + s] /= sum;
  }
  return weights;
}

function byToken(values, { num_pairs: pairs }, length, pair) {
  return Float64Array.from({ length }, (_, t) => values[values.length === 1 ? 0 : t * pairs + pair]);
}

function largest(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

function roundHalfEven(x) {
  const below = Math.floor(x);
  const rest = x - below;
  if (rest !== 0.5) return rest < 0.5 ? below : below + 1;
  return below % 2 === 0 ? below : below + 1;
}
