// Run the planner, away from the page's thread. Each message is a request, whose answer is what
// ask.py returns.
import { loadPyodide } from "./runtime/pyodide.mjs";
import { start } from "./start.mjs";

const begin = performance.now();
const planner = fetch("planner.zip").then(response => response.arrayBuffer());
const source = fetch("ask.py").then(response => response.text());
const loaded = start(loadPyodide, new URL("runtime/", self.location.href).href, planner, source);
loaded.then(
  () => self.postMessage({ ready: true, milliseconds: performance.now() - begin }),
  error => self.postMessage({ failed: String(error) }),
);

self.onmessage = async ({ data: { id, options, config } }) => {
  const { ask } = await loaded;
  const begin = performance.now();
  let text;
  try {
    text = ask(options, config);
  } catch (error) {  // a mistake in the planner, whose traceback is in the console
    console.error(error);
    text = `error: The planner has failed: ${String(error).trim().split("\n").at(-1)}`;
  }
  self.postMessage({ id, text, milliseconds: performance.now() - begin });
};
