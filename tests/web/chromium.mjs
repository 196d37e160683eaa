// Chromium as these tests start it: no sandbox, which needs no root, and no connections of its own.
import { chromium } from "../../examples/web/node_modules/playwright-core/index.mjs";

const QUIET = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

/** A page of a new browser; `flags` are added to the browser's. */
export async function openPage(executablePath, flags) {
  const browser = await chromium.launch({ executablePath, args: [...QUIET, ...flags] });
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  page.setDefaultTimeout(600000);
  return { browser, page };
}
