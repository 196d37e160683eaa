// Answers a request about a folder with what examples/web computes of it under Node: token ids, text, readings, maps.
import { readFileSync } from "node:fs";
import * as ort from "../../examples/web/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { layerLogits, pairMaps } from "../../examples/web/maps.js";
import { FILES, Model } from "../../examples/web/model.js";

const { folder, texts = [], ids, count = 0, maps = [] } = JSON.parse(readFileSync(0, "utf8"));
ort.env.wasm.numThreads = 1;
const model = await Model.open(ort, Object.fromEntries(FILES.map((name) => [name, readFileSync(`${folder}/${name}`)])), ["wasm"]);
const encoded = texts.map((text) => model.encode(text));
const decoded = encoded.map((each) => model.decode(each));
const tokens = [];
const reading = await model.read(ids);
for await (const token of model.generate(reading, count)) tokens.push(token);
const layers = maps.length ? reading.layers : [];
const drawn = maps.map(({ layer, pair, bits, granularity }) =>
  pairMaps(model.about, layers[layer], layerLogits(model.about, layers[layer]), pair, bits, granularity),
);
const plain = (key, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
process.stdout.write(JSON.stringify({ encoded, decoded, tokens, layers, maps: drawn }, plain));
