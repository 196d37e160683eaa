/** Drawing of attention maps and of λ on canvases, in the colours that the style sheet gives. */

/** The page's colours as [r, g, b] by name. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).match(/[\da-f]{2}/gi).map((part) => parseInt(part, 16));
  return { signal: colour("--signal"), noise: colour("--noise"), surface: colour("--surface"), ink: colour("--ink") };
}

/** Colour of a weight: the stronger, the larger; above 0 that of the signal, below that of the noise. */
export function shade(weight, hues, above = "signal") {
  const hue = weight < 0 ? hues.noise : hues[above];
  // The root lets small weights be seen beside that of the first token, which often takes most.
  const strength = Math.sqrt(Math.min(1, Math.abs(weight)));
  return hues.surface.map((part, i) => Math.round(part + (hue[i] - part) * strength));
}

/**
 * A map [T, T]: a row for each token that looks, a column for each that is looked at.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Float64Array} map
 * @param {number} length T.
 * @param {number} selected Row to frame.
 * @param {object} hues From `palette`.
 * @param {"signal" | "noise"} above Colour of weights above 0.
 */
export function drawMap(canvas, map, length, selected, hues, above) {
  const picture = new ImageData(length, length);
  for (let t = 0; t < length; t++) {
    for (let s = 0; s <= t; s++) picture.data.set([...shade(map[t * length + s], hues, above), 255], (t * length + s) * 4);
  }
  const cells = new OffscreenCanvas(length, length);
  cells.getContext("2d").putImageData(picture, 0, 0);
  const { context, width, height } = fitted(canvas);
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, 0, 0, width, height);
  context.strokeStyle = `rgb(${hues.ink})`;
  context.lineWidth = 2;
  const cell = height / length;
  context.strokeRect(1, selected * cell, ((selected + 1) * width) / length - 2, Math.max(cell, 3));
}

/** λ [T] as bars, token by token; a line marks 1. */
export function drawLambda(canvas, lambda, selected, hues) {
  const { context, width, height } = fitted(canvas);
  const top = Math.max(1, ...lambda);
  lambda.forEach((value, t) => {
    context.fillStyle = `rgb(${t === selected ? hues.ink : hues.noise})`;
    const bar = (height * value) / top;
    context.fillRect((t * width) / lambda.length, height - bar, Math.max(1, width / lambda.length - 1), bar);
  });
  context.fillStyle = `rgb(${hues.ink})`;
  context.fillRect(0, height - height / top, width, 1);
}

/** A canvas with as many dots as the screen has where it stands, cleared. */
function fitted(canvas) {
  const width = Math.round(canvas.clientWidth * devicePixelRatio);
  const height = Math.round(canvas.clientHeight * devicePixelRatio);
  Object.assign(canvas, { width, height });
  return { context: canvas.getContext("2d"), width, height };
}
