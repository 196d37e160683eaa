/** The worker that holds the model, so that the page answers while it computes. */

import { FILES, Model } from "./model.js";

const RUNTIME = "./node_modules/onnxruntime-web/dist/";
let model = null;
let isStopped = false;

const actions = {
  /** Opens a folder on "webgpu" or "wasm"; falls back to the latter, and says why. */
  async open({ folder, backend }) {
    model = null;
    const files = await download(folder);
    let note = "";
    if (backend === "webgpu") {
      try {
        await openOn("webgpu", files);
      } catch (error) {
        note = `WebGPU cannot be used here (${error.message}), so WebAssembly is.`;
      }
    }
    if (!model) await openOn("wasm", files);
    post("opened", { about: model.about, backend: backend === "webgpu" && !note ? "WebGPU" : "WebAssembly", note });
  },

  /** Continues a prompt token by token; maps come of the prompt first, and of the whole text at the end. */
  async generate({ prompt, count, most }) {
    const ids = model.encode(prompt);
    const room = Math.min(most, model.about.context);
    if (ids.length >= room) {
      throw new Error(`The prompt has ${ids.length} tokens; the maps have room for ${room - 1}. Shorten it.`);
    }
    isStopped = false;
    const started = performance.now();
    const reading = await model.read(ids);
    send("prompt", ids, reading);
    const fresh = [];
    let firstAt = started;
    for await (const token of model.generate(reading, Math.min(count, room - ids.length))) {
      fresh.push(token);
      if (fresh.length === 1) firstAt = performance.now();
      const seconds = (performance.now() - firstAt) / 1000;
      const rate = fresh.length > 1 ? (fresh.length - 1) / seconds : null;
      post("token", { text: model.decode(fresh), count: fresh.length, rate, firstSeconds: (firstAt - started) / 1000 });
      // A message that asks to stop is delivered between two tokens.
      await new Promise((resume) => setTimeout(resume));
      if (isStopped) break;
    }
    const whole = [...ids, ...fresh];
    send("done", whole, await model.read(whole));
  },

  stop() {
    isStopped = true;
  },
};

self.onmessage = async ({ data }) => {
  try {
    await actions[data.type](data);
  } catch (error) {
    post("failed", { message: error.message, lacks: error.lacks });
  }
};

async function openOn(backend, files) {
  if (backend === "webgpu" && !(await navigator.gpu?.requestAdapter())) throw new Error("this browser offers no adapter");
  const file = `${RUNTIME}ort.${backend}.min.mjs`;
  const ort = await import(file).catch(() => {
    throw lacking("libraries", `${file} cannot be loaded.`);
  });
  const opened = await Model.open(ort, files, [backend]);
  // Shaders are compiled at the first call, which may fail where opening did not.
  await opened.read([0, 0]);
  model = opened;
}

function send(type, ids, { layers }) {
  post(type, { pieces: model.pieces(ids), layers });
}

async function download(folder) {
  const files = {};
  let loaded = 0;
  for (const name of FILES) {
    const response = await fetch(`${folder}/${name}`);
    if (!response.ok) throw lacking("model", `${folder}/${name} is missing (status ${response.status}).`);
    const chunks = [];
    for await (const chunk of chunksOf(response.body)) {
      chunks.push(chunk);
      loaded += chunk.length;
      post("progress", { megabytes: loaded / 1e6 });
    }
    files[name] = new Uint8Array(await new Blob(chunks).arrayBuffer());
  }
  return files;
}

/** An error about something that is to be fetched or made first, "libraries" or "model". */
function lacking(lacks, message) {
  return Object.assign(new Error(message), { lacks });
}

/** Chunks of a stream; not every browser iterates streams by itself. */
async function* chunksOf(stream) {
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

function post(type, details) {
  self.postMessage({ type, ...details });
}
