// CSV in and out, and measured traces in.
"use strict";

// app: {store, pane, setMeasured(measured), say(text, verdict)}
function attachFiles(app) {
  byId("save-csv").onclick = () =>
    refusable(app, () => {
      const name = save(app);
      app.say(`Saved. Run it: python pipedream_simple.py --set schedule=${name}`, "same");
    });
  for (const [id, load] of [["load-csv", loadCsv], ["load-trace", loadTrace]]) {
    byId(id).onchange = async () => {
      const [file] = byId(id).files;
      if (file) await openFile(app, load, file);
      byId(id).value = "";
    };
  }
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) openFile(app, file.name.endsWith(".json") ? loadTrace : loadCsv, file);
  });
}

async function openFile(app, load, file) {
  const text = await file.text();
  refusable(app, () => load(app, text, file.name));
}

// The file's name; RuleError for what a CSV cannot say.
function save({ store, pane }) {
  const { schedule, n } = resolved(store.chosen);
  if (!pane.run) throw new RuleError("there is no order");
  if (!pane.run.policy.flushes) {
    throw new RuleError("it does not flush, and a CSV has no operation that updates weights");
  }
  if (n > 1) throw new RuleError("a CSV is one batch; set batches to 1");
  const name = `${schedule === "csv" ? "order" : schedule}.csv`;
  saveFile(name, toCsv(pane.run.timeline.schedule), "text/csv");
  return name;
}

function refusable(app, act) {
  try {
    act();
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    app.say(`Not possible: ${error.message}.`, "illegal");
  }
}

function loadCsv(app, text, name) {
  const schedule = fromCsv(text, "csv");
  app.setMeasured(null);
  app.store.change({ ...fixedBy(schedule), csv: toCsv(schedule), level: 0 });
  app.say(`${name}: ${schedule.numRanks} ranks, ${schedule.numMicrobatches} microbatches.`, "same");
}

// The trace's own orders and mean durations are what is simulated; one unit is a millisecond.
function loadTrace(app, text, name) {
  const trace = readTrace(text);
  const { durations, schedule, group } = trace;
  const [F, I, W, c] = [..."FIWc"].map((key) => String(durations[key]));
  app.store.change({
    ...fixedBy(schedule), csv: toCsv(schedule), F, I, W, c, level: 0,
    scale: durations.scale.every((f) => f === 1) ? [] : durations.scale.map(String),
  });
  app.setMeasured(trace);
  const what = `${name}: the ${group} run lies under its simulation, which takes the trace's orders`;
  app.say(`${what} and mean durations, in ms.`, "same");
}

function fixedBy(schedule) {
  const [p, m] = [schedule.numRanks, schedule.numMicrobatches];
  if (p > WHOLE.p[1] || m > WHOLE.m[1]) {
    throw new RuleError(`it has ${p} ranks and ${m} microbatches; 16 and 64 are the most`);
  }
  return { schedule: "csv", p, m, n: 1, cut: false, moves: [] };
}
