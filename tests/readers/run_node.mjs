// Answers a request about folders with the tokens that onnxruntime-web, onnxruntime-node or transformers.js decodes.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, basename } from "node:path";

const { reader, tasks, count } = JSON.parse(readFileSync(0, "utf8"));
const require = createRequire(import.meta.url);
const ARRAYS = { float32: Float32Array, int8: Int8Array, uint8: Uint8Array };

async function openSession(file) {
  if (reader === "onnxruntime-node") {
    const ort = require("onnxruntime-node");
    return [ort, await ort.InferenceSession.create(file, { intraOpNumThreads: 1, logSeverityLevel: 4 })];
  }
  const ort = await import("onnxruntime-web");
  ort.env.wasm.numThreads = 1;
  const path = "model.onnx_data";
  const externalData = [{ path, data: new Uint8Array(readFileSync(`${dirname(file)}/${path}`)) }];
  return [ort, await ort.InferenceSession.create(new Uint8Array(readFileSync(file)), { executionProviders: ["wasm"], externalData, logSeverityLevel: 4 })];
}

async function bySession({ file, ids }) {
  const [{ Tensor }, session] = await openSession(file);
  const made = [...ids];
  const pasts = session.inputMetadata.filter(({ name }) => name.startsWith("past"));
  const feeds = {};
  for (const { name, type, shape } of pasts) {
    const sizes = [1, ...shape.slice(1).map((size) => (typeof size === "number" ? size : 0))];
    feeds[name] = new Tensor(type, new ARRAYS[type](sizes.reduce((a, b) => a * b)), sizes);
  }
  for (let step = 0; step < count; step++) {
    const fresh = step ? made.slice(-1) : made;
    feeds.input_ids = new Tensor("int64", BigInt64Array.from(fresh, BigInt), [1, fresh.length]);
    feeds.attention_mask = new Tensor("int64", new BigInt64Array(made.length).fill(1n), [1, made.length]);
    const outputs = await session.run(feeds);
    for (const { name } of pasts) feeds[name] = outputs[name.replace("past_key_values", "present").replace("past_", "present_")];
    const { data, dims } = outputs.logits;
    const last = Array.from(data.slice(data.length - dims[2]));
    made.push(last.indexOf(last.reduce((a, b) => (b > a ? b : a))));
  }
  return made.slice(ids.length);
}

async function byTransformers({ file, ids }) {
  const { AutoModelForCausalLM, Tensor, env } = await import("@huggingface/transformers");
  const folder = dirname(dirname(file));
  env.allowRemoteModels = false;
  env.localModelPath = `${dirname(folder)}/`;
  const model = await AutoModelForCausalLM.from_pretrained(basename(folder), { device: "cpu" });
  const input = new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
  const mask = new Tensor("int64", new BigInt64Array(ids.length).fill(1n), [1, ids.length]);
  const output = await model.generate({ inputs: input, attention_mask: mask, max_new_tokens: count, do_sample: false, eos_token_id: null });
  return Array.from(output.data, Number).slice(ids.length);
}

const answers = {};
for (const [name, task] of Object.entries(tasks)) {
  try {
    answers[name] = await (reader === "transformers.js" ? byTransformers : bySession)(task);
  } catch (error) {
    answers[name] = String(error.message ?? error).slice(0, 600);
  }
}
const manifest = { "transformers.js": "@huggingface/transformers" }[reader] ?? reader;
const { version } = JSON.parse(readFileSync(new URL(`./node_modules/${manifest}/package.json`, import.meta.url)));
process.stdout.write(JSON.stringify({ version, answers }));
