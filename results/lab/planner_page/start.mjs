// Start Python with the planner. `planner` and `source` are the contents of planner.zip and ask.py, or promises of them.
export async function start(loadPyodide, indexURL, planner, source) {
  const loading = loadPyodide({ indexURL, env: { PYDANTIC_DISABLE_PLUGINS: "1" } });
  const [python, archive, code] = await Promise.all([loading, planner, source]);
  python.FS.mkdirTree("/planner/my-model");  // the folder of a pasted config.json
  python.FS.writeFile("/planner.zip", new Uint8Array(archive));
  python.runPython(`
import os, shutil, sys
shutil.unpack_archive("/planner.zip", "/planner")
os.chdir("/planner")
sys.path.insert(0, "/planner")
`);
  python.runPython(code);
  const ask = python.globals.get("ask");
  return {
    python,
    ask(options, config = "") {
      python.FS.writeFile("/planner/my-model/config.json", config);
      return ask(...options);
    },
  };
}
