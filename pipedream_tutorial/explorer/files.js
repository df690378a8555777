// Read and write orders as CSV, with one line per rank and one operation per cell. The tutorial's
// --csv option writes this format, and torch loads it (schedules/ops.py).
"use strict";

const WRITTEN = /^(\d{1,9})([FBIW])(\d{1,9})$/;
const WRITTEN_PAIR = /^\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B$/;

// Line endings match Python's csv module.
function toCsv({ orders }) {
  return orders.map((order) => order.map(itemText).join() + "\r\n").join("");
}

function fromCsv(text) {
  const lines = text.replace(/^\ufeff/, "").split(/\r\n|\r|\n/);
  const orders = lines.map((line, number) => {
    const cells = line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1"));
    return cells.filter(Boolean).map((cell) => parseItem(cell, `line ${number + 1}`));
  });
  while (orders.length && !orders.at(-1).length) orders.pop();
  if (!orders.length) throw new RuleError("the file has no operations; write cells such as 0F0 and 0B0");
  const schedule = new Schedule(orders);
  checkOnceAndWhole(schedule);
  simulate(repeat(schedule, 2), buildCosts(schedule, { F: 1, I: 1, W: 1, c: 0 }));
  return schedule;
}

function parseItem(cell, where) {
  const pair = WRITTEN_PAIR.exec(cell);
  if (pair) return [...parseItem(pair[1], where), ...parseItem(pair[2], where)];
  const op = WRITTEN.exec(cell);
  if (op) return [buildOp(op[2], Number(op[1]), Number(op[3]))];
  throw new RuleError(`${where}: "${cell.slice(0, 40)}" is not an operation; write 2F0 or 2B0`);
}

function checkOnceAndWhole({ orders, numStages, ops }) {
  const rankOf = new Map(); // by stage
  const there = new Set();
  orders.forEach((order, rank) => order.flat().forEach(({ text, stage }) => {
    const other = rankOf.get(stage) ?? rank;
    if (other !== rank) throw new RuleError(`stage ${stage} is on ranks ${other} and ${rank}`);
    if (there.has(text)) throw new RuleError(`${text} appears twice in the orders`);
    rankOf.set(stage, rank);
    there.add(text);
  }));
  for (let stage = 0; stage < numStages; stage++) {
    for (let i = 0; i <= Math.max(...ops.map((op) => op.microbatch)); i++) {
      const [F, B, I, W] = [..."FBIW"].map((kind) => there.has(keyOf(kind, stage, i)));
      if (F && I === W && I !== B) continue;
      throw new RuleError(`stage ${stage} needs F, and B or both I and W, of microbatch ${i}`);
    }
  }
}

function attachFiles() {
  byId("save-csv").onclick = () => attempt(save);
  const open = async ([file]) => {
    if (!file) return;
    const text = await file.text();
    attempt(() => loadCsv(text, file.name));
  };
  byId("load-csv").onchange = async () => {
    await open(byId("load-csv").files);
    byId("load-csv").value = "";
  };
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    open(event.dataTransfer.files);
  });
}

function attempt(act) {
  const error = refusal(act);
  if (error) say(`Not possible: ${error}.`, "illegal");
}

// Throws RuleError for schedules that a CSV file cannot describe.
function save() {
  const { schedule, n } = resolved(store.chosen);
  if (!main.run) throw new RuleError("there is no order to save");
  if (!main.run.policy.flushes) {
    throw new RuleError("the schedule does not flush, and a CSV file cannot contain weight updates");
  }
  if (n > 1) throw new RuleError("a CSV file contains only one batch; set batches to 1");
  const name = `${schedule === "csv" ? "order" : schedule}.csv`;
  const content = new Blob([toCsv(main.run.timeline.schedule)], { type: "text/csv" });
  const link = el("a", { download: name, href: URL.createObjectURL(content) });
  link.click();
  URL.revokeObjectURL(link.href);
  say(`Saved. To simulate the file, run: python pipedream_simple.py --set schedule=${name}`, "same");
}

function loadCsv(text, name) {
  const schedule = fromCsv(text);
  store.change(fixedBy(schedule));
  say(`${name}: ${schedule.numRanks} ranks, ${schedule.numMicrobatches} microbatches.`, "same");
}

function fixedBy(schedule) {
  const { numRanks: p, numMicrobatches: m } = schedule;
  if (p > RULES.p.whole[1] || m > RULES.m.whole[1]) {
    throw new RuleError(`the file has ${p} ranks and ${m} microbatches, but at most 16 ranks and 64 microbatches are supported`);
  }
  return { schedule: "csv", csv: toCsv(schedule), p, m, n: 1, cut: false, moves: [], level: 0 };
}
