// Opens the page of examples/web in Chromium, uses it as a reader would, and answers with what is seen.
import { readFileSync } from "node:fs";
import { openPage } from "./chromium.mjs";

const { chromium, url } = JSON.parse(readFileSync(0, "utf8"));
const { browser, page } = await openPage(chromium, ["--disable-gpu"]);
const problems = [];
const elsewhere = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("request", (request) => /^https?:/.test(request.url()) && !request.url().startsWith(url) && elsewhere.push(request.url()));

const text = (id) => page.textContent(`#${id}`);
const isVisible = (id) => page.isVisible(`#${id}`);
const settled = () => page.waitForFunction(() => !document.getElementById("go").disabled);
/** Colours of a canvas, as a digest that differs where the picture does. */
const picture = (id) => page.evaluate((canvas) => document.getElementById(canvas).toDataURL(), id);

async function widths() {
  const seen = [];
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    for (const width of [390, 768, 1400]) {
      await page.setViewportSize({ width, height: 900 });
      await page.waitForTimeout(100);
      const [whole, background] = await page.evaluate(() => [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]);
      const box = await page.locator("#difference").boundingBox();
      seen.push({ width, colorScheme, whole, background, map: [box.width, box.height] });
    }
  }
  return seen;
}

async function use() {
  await page.goto(url);
  await settled();
  const first = { continuation: await text("continuation"), status: await text("status"), kind: await text("kind"), error: await isVisible("error") };
  const rounded = { at16: await picture("difference"), change: await text("change-difference-4") };
  await page.getByLabel("4 bits").check();
  rounded.at4 = await picture("difference");
  rounded.sums = [await text("sum-signal"), await text("sum-noise")];
  const layer = { opened: await picture("signal") };
  await page.locator("#layer").selectOption({ index: 0 });
  layer.first = await picture("signal");
  const row = { last: await text("row-token") };
  await page.locator("#row").focus();
  await page.keyboard.press("Home");
  row.home = await text("row-token");
  await page.keyboard.press("ArrowRight");
  row.next = await text("row-token");
  return { first, rounded, layer, row, widths: await widths() };
}

/** Elements that the tab key reaches, in order. */
async function keyboard() {
  await page.setViewportSize({ width: 1400, height: 900 });
  await page.evaluate(() => document.activeElement.blur());
  const reached = [];
  for (let i = 0; i < 14; i++) {
    await page.keyboard.press("Tab");
    reached.push(await page.evaluate(() => document.activeElement.id || document.activeElement.name || document.activeElement.tagName));
  }
  return reached;
}

/** The continuation that is shown after a prompt was taken away and the button pressed. */
async function emptyPrompt() {
  await page.fill("#prompt", "");
  await page.click("#go");
  const shown = await text("continuation");
  await settled();
  return shown;
}

async function longPrompt() {
  await page.fill("#prompt", "one two three ".repeat(200));
  await page.click("#go");
  await settled();
  return text("error");
}

async function withoutWebGpu() {
  await page.selectOption("#backend", "webgpu");
  await page.waitForFunction(() => document.getElementById("kind").textContent);
  await settled();
  return { note: await text("note"), kind: await text("kind"), continuation: await text("continuation") };
}

async function missingModel() {
  problems.length = 0;
  await page.selectOption("#model", { index: 1 });
  await page.waitForSelector("#error:not([hidden])");
  return { error: await text("error"), maps: await isVisible("maps"), go: await page.isEnabled("#go") };
}

/** The error of the page where one of the libraries is not there, which is known before the list of models is. */
async function missingLibrary(file) {
  await page.route(`**/${file}`, (route) => route.abort());
  await page.route("**/models.json", async (route) => {
    await new Promise((resume) => setTimeout(resume, 1000));
    await route.continue();
  });
  await page.goto(url);
  await page.waitForSelector("#error:not([hidden])");
  return text("error");
}

const seen = { ...(await use()), reached: await keyboard(), empty: await emptyPrompt(), long: await longPrompt(), fallback: await withoutWebGpu() };
seen.problems = [...problems];
seen.missing = await missingModel();
seen.unfetched = [await missingLibrary("ort.wasm.min.mjs"), await missingLibrary("tokenizers.min.mjs")];
seen.elsewhere = elsewhere;
await browser.close();
process.stdout.write(JSON.stringify(seen));
