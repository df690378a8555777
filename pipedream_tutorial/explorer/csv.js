// Orders as CSV, one line a rank, one operation a cell: what the tutorial's --csv writes and torch
// loads (schedules/ops.py).
"use strict";

const WRITTEN = /^(\d{1,9})([FBIW])(\d{1,9})$/;
const WRITTEN_PAIR = /^\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B$/;

// The line ends are those of Python's csv module.
function toCsv(schedule) {
  if (schedule.chains.length > 1) {
    throw new RuleError("a CSV cannot say that there are two copies of the model");
  }
  if (schedule.ops().some((op) => op.kind === "R")) {
    throw new RuleError("a CSV has no operation that recomputes");
  }
  return schedule.orders.map((order) => order.map((i) => i.text).join() + "\r\n").join("");
}

function fromCsv(text, name) {
  const lines = text.replace(/^\ufeff/, "").split(/\r\n|\r|\n/);
  const orders = lines.map((line, number) => {
    const cells = line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1"));
    return cells.filter(Boolean).map((cell) => parseItem(cell, `line ${number + 1}`));
  });
  while (orders.length && !orders.at(-1).length) orders.pop();
  const numStages = checkStages(orders);
  const perRank = Math.max(1, Math.floor(numStages / orders.length));
  const schedule = new Schedule(name, orders, oneChain(numStages), perRank);
  checkPasses(schedule);
  simulate(repeat(schedule, 2), buildCosts(schedule, { F: 1, I: 1, W: 1, c: 0 }));
  return schedule;
}

function parseItem(cell, where) {
  const pair = WRITTEN_PAIR.exec(cell);
  if (pair) return new Pair(parseItem(pair[1], where), parseItem(pair[2], where));
  const op = WRITTEN.exec(cell);
  if (op) return new Op(op[2], Number(op[1]), Number(op[3]));
  throw new RuleError(`${where}: "${cell.slice(0, 40)}" is no operation; write 2F0 or 2B0`);
}

function checkStages(orders) {
  const rankOf = new Map();
  orders.forEach((order, rank) => {
    for (const { stage } of order.flatMap((item) => item.parts)) {
      const other = rankOf.get(stage) ?? rank;
      if (other !== rank) throw new RuleError(`stage ${stage} is on ranks ${other} and ${rank}`);
      rankOf.set(stage, rank);
    }
  });
  if (!rankOf.size) throw new RuleError("it holds no operation; write cells such as 0F0 and 0B0");
  const most = Math.max(...rankOf.keys());
  const missing = oneChain(most)[0].find((stage) => !rankOf.has(stage));
  if (missing === undefined) return rankOf.size;
  throw new RuleError(`there is a stage ${most} but no stage ${missing}`);
}

function checkPasses(schedule) {
  const [ops, m] = [schedule.ops(), schedule.numMicrobatches];
  if (Math.max(...ops.map((op) => op.microbatch)) !== m - 1) {
    throw new RuleError(`its ${m} microbatches are not numbered 0 to ${m - 1}`);
  }
  const there = new Set(ops.map((op) => op.text));
  for (const { stage, microbatch: i } of ops) {
    const has = (kind) => there.has(keyOf(kind, stage, i));
    if (has("F") && (has("B") || (has("I") && has("W")))) continue;
    throw new RuleError(`stage ${stage} needs F, and B or both I and W, of microbatch ${i}`);
  }
}
