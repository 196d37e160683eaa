// Continues the page's prompt on WebGPU, which Chromium computes on the processor here, and stops it; answers with what is seen.
import { readFileSync } from "node:fs";
import { openPage } from "./chromium.mjs";

const { chromium, url } = JSON.parse(readFileSync(0, "utf8"));
const flags = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--enable-unsafe-swiftshader"];
const { browser, page } = await openPage(chromium, flags);
const settled = () => page.waitForFunction(() => !document.getElementById("go").disabled);
await page.goto(url);
await page.selectOption("#count", "16");
await settled();
const wanted = await page.textContent("#continuation");
await page.selectOption("#backend", "webgpu");
await page.waitForFunction(() => document.getElementById("kind").textContent);
const kind = await page.textContent("#kind");
const note = await page.textContent("#note");
// A few tokens are enough, and a processor needs long for each.
await page.waitForFunction(() => document.getElementById("continuation").textContent);
await page.click("#stop");
await settled();
const seen = { wanted, kind, note, continuation: await page.textContent("#continuation"), sum: await page.textContent("#sum-signal") };
await browser.close();
process.stdout.write(JSON.stringify(seen));
