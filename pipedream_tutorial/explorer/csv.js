// Orders as CSV, one line a rank, one operation a cell: what the tutorial's --csv writes and torch
// loads (schedules/ops.py).
"use strict";

const WRITTEN = /^(\d{1,9})([FBIW])(\d{1,9})$/;
const WRITTEN_PAIR = /^\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B$/;

// The line ends are those of Python's csv module.
function toCsv({ orders, copies, ops }) {
  if (copies > 1) throw new RuleError("a CSV cannot say that there are two copies of the model");
  if (ops.some((op) => op.kind === "R")) throw new RuleError("a CSV has no operation that recomputes");
  return orders.map((order) => order.map((item) => item.text).join() + "\r\n").join("");
}

function fromCsv(text) {
  const lines = text.replace(/^\ufeff/, "").split(/\r\n|\r|\n/);
  const orders = lines.map((line, number) => {
    const cells = line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1"));
    return cells.filter(Boolean).map((cell) => parseItem(cell, `line ${number + 1}`));
  });
  while (orders.length && !orders.at(-1).length) orders.pop();
  if (!orders.length) throw new RuleError("it holds no operation; write cells such as 0F0 and 0B0");
  const ops = orders.flat(2).flatMap((item) => item.parts);
  const schedule = new Schedule(orders, 1 + Math.max(...ops.map((op) => op.stage)));
  checkOnceAndWhole(schedule, 1 + Math.max(...ops.map((op) => op.microbatch)));
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

function checkOnceAndWhole({ ops, places, numStages }, m) {
  const rankOf = new Map();
  const there = new Set();
  for (const { text, stage } of ops) {
    const { rank } = places.get(text);
    const other = rankOf.get(stage) ?? rank;
    if (other !== rank) throw new RuleError(`stage ${stage} is on ranks ${other} and ${rank}`);
    if (there.has(text)) throw new RuleError(`${text} is in the orders twice`);
    rankOf.set(stage, rank);
    there.add(text);
  }
  for (let stage = 0; stage < numStages; stage++) {
    for (let i = 0; i < m; i++) {
      const [F, B, I, W] = [..."FBIW"].map((kind) => there.has(keyOf(kind, stage, i)));
      if (F && I === W && I !== B) continue;
      throw new RuleError(`stage ${stage} needs F, and B or both I and W, of microbatch ${i}`);
    }
  }
}
