// Logits that llama.cpp computes for the same tokens from each of some GGUF files; request and answer are JSON.

import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const { models, tokens, length } = JSON.parse(readFileSync(0));
const llama = await getLlama({ gpu: false, build: "never", logLevel: "disabled", maxThreads: 1, skipDownload: true });
// llama.cpp keeps K and V in float16 unless it is told otherwise.
const options = {
  contextSize: length,
  batchSize: tokens.length,
  flashAttention: false,
  threads: 1,
  experimentalKvCacheKeyType: "F32",
  experimentalKvCacheValueType: "F32",
};
const answers = [];
for (const modelPath of models) {
  const model = await llama.loadModel({ modelPath, useMmap: false });
  const context = await model.createContext(options);
  const asked = tokens.map((token) => [token, { generateNext: { logits: true } }]);
  const found = await context.getSequence().controlledEvaluate(asked);
  answers.push(found.map(({ next }) => [...next.logits].sort(([a], [b]) => a - b).map(([, logit]) => logit)));
  await model.dispose();
}
const answer = JSON.stringify({ release: llama.llamaCppRelease.release, answers });
process.stdout.write(answer, () => process.exit(0));
