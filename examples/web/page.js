/** The page: controls, text and speed of generation, and the maps of the layer, pair and bits that are chosen. */

import { drawLambda, drawMap, palette, shade } from "./draw.js";
import { change, layerLogits, pairMaps } from "./maps.js";

// Maps are drawn for this many tokens at most: a cell is then still a pixel wide on a phone.
const MOST_TOKENS = 256;
const MAPS = ["signal", "noise", "difference"];
const NAMES = { signal: "signal map", noise: "noise map", difference: "difference" };
const BITS = [16, 8, 6, 4];
const FETCH = "Fetch the libraries once:\n\ncd examples/web && npm ci --ignore-scripts --omit=dev";

const $ = (id) => document.getElementById(id);
const models = await (await fetch("./models.json")).json();
// Nothing is awaited between this and its handlers: an error before them would be heard by nobody.
const worker = new Worker("./worker.js", { type: "module" });
let about = null;
let reading = null;
let shown = null;

const answers = {
  progress({ megabytes }) {
    status(`Fetching the model: ${megabytes.toFixed(1)} MB`);
  },
  opened({ about: opened, backend, note }) {
    about = opened;
    fill($("layer"), about.layers, "Layer");
    fill($("pair"), about.num_pairs, "Pair");
    // Heads of later layers tell tokens apart; those of the first one look everywhere.
    $("layer").value = Math.floor((3 * about.layers) / 4);
    $("kind").textContent = `${about.generation}, ${about.layers} layers of ${about.num_pairs} pairs, on ${backend}`;
    tell("note", note);
    generate();
  },
  prompt(message) {
    showReading(message);
    status("The prompt is read.");
  },
  token({ text, count, rate, firstSeconds }) {
    $("continuation").textContent = text;
    const first = `first token after ${firstSeconds.toFixed(2)} s`;
    status(rate === null ? first : `${count} tokens, ${rate.toFixed(1)} tokens per second, ${first}`);
  },
  done(message) {
    showReading(message);
    setBusy(false);
  },
  failed({ message, lacks }) {
    setBusy(false);
    status("");
    const advice = { model: `Make the folder in the checkout:\n\n${chosenModel().make.join("\n")}`, libraries: FETCH };
    tell("error", [message, advice[lacks] ?? ""].join(" "));
  },
};

worker.onmessage = ({ data }) => answers[data.type](data);
worker.onerror = () => {
  setBusy(false);
  status("");
  tell("error", `The tokenizer cannot be loaded. ${FETCH}`);
};

models.forEach(({ name }, number) => $("model").add(new Option(name, number)));
BITS.forEach((bits) => $("bits").append(bitsChoice(bits)));
$("model").onchange = $("backend").onchange = open;
$("ask").onsubmit = (event) => {
  event.preventDefault();
  generate();
};
$("stop").onclick = () => worker.postMessage({ type: "stop" });
for (const id of ["layer", "pair", "bits", "granularity"]) $(id).onchange = showMaps;
$("row").oninput = showRow;
for (const map of MAPS) $(map).onclick = (event) => choose(event.offsetY / $(map).clientHeight);
$("lambda").onclick = (event) => choose(event.offsetX / $("lambda").clientWidth);
new ResizeObserver(draw).observe($("maps"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showRow);
open();

function chosenModel() {
  return models[$("model").value];
}

function open() {
  about = reading = shown = null;
  $("prompt").value = chosenModel().prompt;
  $("about-model").textContent = chosenModel().note;
  $("maps").hidden = true;
  for (const id of ["kind", "continuation", "echo"]) $(id).textContent = "";
  tell("error", "");
  tell("note", "");
  setBusy(true);
  status("Opening the model");
  worker.postMessage({ type: "open", folder: chosenModel().folder, backend: $("backend").value });
}

function generate() {
  tell("error", "");
  $("echo").textContent = $("prompt").value;
  $("continuation").textContent = "";
  setBusy(true);
  worker.postMessage({ type: "generate", prompt: $("prompt").value, count: Number($("count").value), most: MOST_TOKENS });
}

function showReading({ pieces, layers }) {
  reading = { pieces, layers };
  $("row").max = pieces.length - 1;
  $("row").value = pieces.length - 1;
  $("maps").hidden = false;
  showMaps();
}

/** Computes the maps of the chosen layer and pair at every number of bits, and shows those of the chosen one. */
function showMaps() {
  if (!reading) return;
  const layer = reading.layers[$("layer").value];
  const logits = layerLogits(about, layer);
  const granularity = $("granularity").value;
  const byBits = BITS.map((bits) => pairMaps(about, layer, logits, Number($("pair").value), bits, granularity));
  const chosen = BITS.indexOf(Number($("bits").querySelector(":checked").value));
  shown = byBits[chosen];
  BITS.slice(1).forEach((bits, i) => {
    for (const map of MAPS) {
      $(`change-${map}-${bits}`).textContent = `${(100 * change(byBits[i + 1][map], byBits[0][map])).toFixed(1)} %`;
    }
  });
  showRow();
}

/** Shows what the chosen token looks at. */
function showRow() {
  if (!shown) return;
  const row = Number($("row").value);
  const hues = palette();
  $("row-token").textContent = `token ${row + 1} of ${shown.length}: “${reading.pieces[row]}”`;
  $("row").setAttribute("aria-valuetext", $("row-token").textContent);
  $("row-lambda").textContent = shown.lambda[row].toFixed(3);
  for (const map of MAPS) {
    const weights = shown[map].subarray(row * shown.length, row * shown.length + row + 1);
    $(`text-${map}`).replaceChildren(...reading.pieces.slice(0, row + 1).map((piece, s) => token(piece, weights[s], hues, map)));
    const largest = weights.reduce((best, weight, s) => (Math.abs(weight) > Math.abs(weights[best]) ? s : best), 0);
    const sum = weights.reduce((total, weight) => total + weight, 0);
    $(`sum-${map}`).textContent = `sum ${sum.toFixed(2)}; the largest weight, ${weights[largest].toFixed(2)}, is on “${reading.pieces[largest].trim()}”`;
    $(map).setAttribute("aria-label", `${NAMES[map]} of ${shown.length} tokens; the chosen row has ${$(`sum-${map}`).textContent}`);
  }
  draw();
}

function draw() {
  if (!shown || $("maps").hidden) return;
  const row = Number($("row").value);
  const hues = palette();
  for (const map of MAPS) drawMap($(map), shown[map], shown.length, row, hues, map === "noise" ? "noise" : "signal");
  drawLambda($("lambda"), shown.lambda, row, hues);
}

/** Chooses the token at a share of the way along a picture. */
function choose(share) {
  $("row").value = Math.floor(share * shown.length);
  showRow();
}

function token(piece, weight, hues, map) {
  const span = document.createElement("span");
  const colour = shade(weight, hues, map === "noise" ? "noise" : "signal");
  span.textContent = piece;
  span.title = weight.toFixed(4);
  span.style.backgroundColor = `rgb(${colour})`;
  const isDark = colour[0] * 0.3 + colour[1] * 0.59 + colour[2] * 0.11 < 130;
  span.style.color = isDark ? "#fff" : "#111";
  return span;
}

function bitsChoice(bits) {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "radio", name: "bits", value: bits, checked: bits === 16 });
  label.append(input, `${bits} bits`);
  return label;
}

function fill(select, count, name) {
  select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`${name} ${i + 1}`, i)));
}

function setBusy(isBusy) {
  for (const id of ["model", "backend"]) $(id).disabled = isBusy;
  $("go").disabled = isBusy || !about;
  $("stop").disabled = !isBusy || !about;
}

function status(text) {
  $("status").textContent = text;
}

/** Puts a message on the page, or takes it away. */
function tell(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}
