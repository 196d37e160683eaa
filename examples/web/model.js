/**
 * A folder that `diffquant export --web` wrote, run by onnxruntime-web: text to tokens, tokens to more tokens, and what
 * attention maps are computed of.
 */

import { Tokenizer } from "./node_modules/@huggingface/tokenizers/dist/tokenizers.min.mjs";

const DATA = "model.onnx.data";
export const FILES = ["web.json", "tokenizer.json", "tokenizer_config.json", "model.onnx", DATA];

/**
 * Queries, keys and λ of one layer, as the graph gives them.
 *
 * @typedef {object} LayerReading
 * @property {Float32Array} query Rotated queries [T, (h+n)·d], heads in the op's order.
 * @property {Float32Array} key Rotated keys [h_kv, T, dk].
 * @property {Float32Array} lambda λ, [1] or [T, h].
 * @property {Float32Array | null} signalGate Factor of the signal map [T, h]; null for 1.
 */

export class Model {
  /**
   * Opens a folder.
   *
   * @param {object} ort The module onnxruntime-web.
   * @param {Record<string, Uint8Array>} files Contents of `FILES` by name.
   * @param {string[]} providers Execution providers, the preferred one first.
   */
  static async open(ort, files, providers) {
    const [about, tokenizer, config] = FILES.slice(0, 3).map((name) => parse(files[name], name));
    const session = await ort.InferenceSession.create(files["model.onnx"], {
      executionProviders: providers,
      externalData: [{ path: DATA, data: files[DATA] }],
      logSeverityLevel: 3,
    });
    return new Model(ort, session, about, new Tokenizer(tokenizer, config));
  }

  constructor(ort, session, about, tokenizer) {
    this.ort = ort;
    this.session = session;
    this.about = about;
    this.tokenizer = tokenizer;
    this.pasts = session.inputNames.filter((name) => name.startsWith("past_key_values."));
    this.presents = this.pasts.map((name) => name.replace("past_key_values", "present"));
  }

  /** Token ids of a text, with the special tokens that the tokenizer adds. */
  encode(text) {
    return this.tokenizer.encode(text).ids;
  }

  /** Text of token ids, without special tokens. */
  decode(ids) {
    return ids.length ? this.tokenizer.decode(ids, { skip_special_tokens: true }) : "";
  }

  /** Each token's own text. */
  pieces(ids) {
    return ids.map((id) => this.tokenizer.decode([id], { skip_special_tokens: false }));
  }

  /**
   * Reads token ids from the start.
   *
   * @param {number[]} ids
   * @returns {Promise<{layers: LayerReading[], outputs: object, length: number}>} Readings of the layers, and what
   *   `generate` goes on from.
   */
  async read(ids) {
    const maps = this.session.outputNames.filter((name) => name.startsWith("maps."));
    const outputs = await this.#run(ids, ids.length, this.#empty(), ["logits", ...this.presents, ...maps]);
    const layers = Array.from({ length: this.about.layers }, (_, layer) => ({
      query: outputs[`maps.${layer}.query`].data,
      key: outputs[`present.${layer}.key`].data,
      lambda: outputs[`maps.${layer}.lambda`].data,
      signalGate: outputs[`maps.${layer}.signal_gate`]?.data ?? null,
    }));
    return { layers, outputs, length: ids.length };
  }

  /** Yields up to `count` token ids that continue what `read` has read, greedily; ends at one that ends the text. */
  async *generate({ outputs, length }, count) {
    for (let made = 1; made <= count; made++) {
      const token = likeliest(outputs.logits);
      if (this.about.ends.includes(token)) return;
      yield token;
      if (made === count) return;
      const caches = Object.fromEntries(this.pasts.map((name, i) => [name, outputs[this.presents[i]]]));
      outputs = await this.#run([token], length + made, caches, ["logits", ...this.presents]);
    }
  }

  #run(fresh, length, caches, fetches) {
    const { Tensor } = this.ort;
    const feeds = {
      ...caches,
      input_ids: new Tensor("int64", BigInt64Array.from(fresh, BigInt), [1, fresh.length]),
      attention_mask: new Tensor("int64", new BigInt64Array(length).fill(1n), [1, length]),
    };
    return this.session.run(feeds, fetches);
  }

  #empty() {
    const { head_dim: width, shares_keys: isShared, num_kv_pairs: pairs } = this.about;
    const shape = [1, pairs, 0, isShared ? width : 2 * width];
    return Object.fromEntries(this.pasts.map((name) => [name, new this.ort.Tensor("float32", new Float32Array(0), shape)]));
  }
}

/** Token with the largest logit at the last position of logits [1, T, V]. */
function likeliest({ data, dims }) {
  const start = data.length - dims[2];
  let best = 0;
  for (let token = 1; token < dims[2]; token++) {
    if (data[start + token] > data[start + best]) best = token;
  }
  return best;
}

function parse(bytes, name) {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Error(`${name} cannot be read (${error.message}); export the model again with --web`);
  }
}
