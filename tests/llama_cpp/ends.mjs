// Tokens at which llama.cpp stops with the vocabulary of each of some GGUF files; request and answer are JSON.

import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const { models, size } = JSON.parse(readFileSync(0));
const llama = await getLlama({ gpu: false, build: "never", logLevel: "disabled", maxThreads: 1, skipDownload: true });
const answers = [];
for (const modelPath of models) {
  const model = await llama.loadModel({ modelPath, vocabOnly: true });
  answers.push([...Array(size).keys()].filter((token) => model._model.isEogToken(token)));
  await model.dispose();
}
process.stdout.write(JSON.stringify(answers), () => process.exit(0));
