// The schedules by name (schedules/catalogue.py), and those that the reader brings: from search,
// from a CSV, from a trace.

import * as orders from "./orders.mjs";
import { RuleError } from "./ops.mjs";

export const SCHEDULES = {
  naive: { build: orders.naive, policy: "flush", title: "Naive" },
  gpipe: { build: orders.gpipe, policy: "flush", title: "GPipe" },
  "1f1b": { build: orders.oneFOneB, policy: "flush", title: "1F1B with flush" },
  "eager-1f1b": { build: orders.eager1F1B, policy: "flush", title: "Eager 1F1B" },
  pipedream: { build: orders.oneFOneB, policy: "stash", title: "PipeDream" },
  "pipedream-vertical": {
    build: orders.oneFOneB, policy: "vertical", title: "PipeDream, vertical sync",
  },
  "pipedream-no-stash": {
    build: orders.oneFOneB, policy: "in-place", title: "PipeDream, no stashing",
  },
  "pipedream-2bw": { build: orders.oneFOneB, policy: "2bw", title: "PipeDream-2BW" },
  interleaved: {
    build: orders.interleaved1F1B, policy: "flush", chunks: true, title: "Interleaved 1F1B",
  },
  "zb-h1": { build: orders.zbH1, policy: "flush", title: "ZB-H1" },
  "zb-h2": { build: orders.zbH2, policy: "flush", title: "ZB-H2" },
  "zb-v": { build: orders.zbV, policy: "flush", title: "ZB-V" },
  "v-half": { build: orders.vHalf, policy: "flush", title: "V-Half" },
  "v-min": { build: orders.vMin, policy: "flush", title: "V-Min" },
  "dualpipe-v": { build: orders.dualpipeV, policy: "flush", title: "DualPipeV" },
  dualpipe: { build: orders.dualpipe, policy: "flush", title: "DualPipe" },
  chimera: { build: orders.chimera, policy: "flush", title: "Chimera" },
};

export function buildSchedule(name, p, m, v = 2) {
  const entry = SCHEDULES[name];
  if (!entry) throw new RuleError(`unknown schedule ${name}`);
  return entry.build(p, m, v);
}
