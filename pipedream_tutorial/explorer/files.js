// CSV in and out, and measured traces in.
"use strict";

// app: {store, pane, setMeasured(measured), say(text, verdict)}
function attachFiles(app) {
  byId("save-csv").onclick = () => refusable(app, save);
  const open = async (file, load) => {
    if (!file) return;
    const text = await file.text();
    refusable(app, () => load(app, text, file.name));
  };
  for (const [id, load] of [["load-csv", loadCsv], ["load-trace", loadTrace]]) {
    byId(id).onchange = async () => {
      await open(byId(id).files[0], load);
      byId(id).value = "";
    };
  }
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    open(file, file?.name.endsWith(".json") ? loadTrace : loadCsv);
  });
}

function refusable(app, act) {
  try {
    act(app);
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    app.say(`Not possible: ${error.message}.`, "illegal");
  }
}

// RuleError for what a CSV cannot say.
function save({ store, pane, say }) {
  const { schedule, n } = resolved(store.chosen);
  if (!pane.run) throw new RuleError("there is no order");
  if (!pane.run.policy.flushes) {
    throw new RuleError("it does not flush, and a CSV has no operation that updates weights");
  }
  if (n > 1) throw new RuleError("a CSV is one batch; set batches to 1");
  const name = `${schedule === "csv" ? "order" : schedule}.csv`;
  const content = new Blob([toCsv(pane.run.timeline.schedule)], { type: "text/csv" });
  const link = el("a", { download: name, href: URL.createObjectURL(content) });
  link.click();
  URL.revokeObjectURL(link.href);
  say(`Saved. Run it: python pipedream_simple.py --set schedule=${name}`, "same");
}

function loadCsv(app, text, name) {
  const schedule = fromCsv(text);
  app.setMeasured(null);
  app.store.change(fixedBy(schedule));
  app.say(`${name}: ${schedule.numRanks} ranks, ${schedule.numMicrobatches} microbatches.`, "same");
}

// The trace's own orders and mean durations are what is simulated; one unit is a millisecond.
function loadTrace(app, text, name) {
  const trace = readTrace(text);
  const { durations: { scale, ...times }, schedule, group } = trace;
  const units = Object.fromEntries(Object.entries(times).map(([key, time]) => [key, String(time)]));
  app.store.change({
    ...fixedBy(schedule), ...units, scale: scale.every((factor) => factor === 1) ? [] : scale.map(String),
  });
  app.setMeasured(trace);
  const what = `${name}: the ${group} run lies under its simulation, which takes the trace's orders`;
  app.say(`${what} and mean durations, in ms.`, "same");
}

function fixedBy(schedule) {
  const { numRanks: p, numMicrobatches: m } = schedule;
  if (p > RULES.p.whole[1] || m > RULES.m.whole[1]) {
    throw new RuleError(`it has ${p} ranks and ${m} microbatches; 16 and 64 are the most`);
  }
  return { schedule: "csv", csv: toCsv(schedule), p, m, n: 1, cut: false, moves: [], level: 0 };
}
