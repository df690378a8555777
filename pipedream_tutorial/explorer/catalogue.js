// The schedules by name (schedules/catalogue.py), and those that the reader brings: from search,
// from a CSV, from a trace.
"use strict";

const SCHEDULES = {
  naive: { build: naive, policy: "flush", title: "Naive" },
  gpipe: { build: gpipe, policy: "flush", title: "GPipe" },
  "1f1b": { build: oneFOneB, policy: "flush", title: "1F1B with flush" },
  "eager-1f1b": { build: eager1F1B, policy: "flush", title: "Eager 1F1B" },
  pipedream: { build: oneFOneB, policy: "stash", title: "PipeDream" },
  "pipedream-vertical": {
    build: oneFOneB, policy: "vertical", title: "PipeDream, vertical sync",
  },
  "pipedream-no-stash": {
    build: oneFOneB, policy: "in-place", title: "PipeDream, no stashing",
  },
  "pipedream-2bw": { build: oneFOneB, policy: "2bw", title: "PipeDream-2BW" },
  interleaved: {
    build: interleaved1F1B, policy: "flush", chunks: true, title: "Interleaved 1F1B",
  },
  "zb-h1": { build: zbH1, policy: "flush", title: "ZB-H1" },
  "zb-h2": { build: zbH2, policy: "flush", title: "ZB-H2" },
  "zb-v": { build: zbV, policy: "flush", title: "ZB-V" },
  "v-half": { build: vHalf, policy: "flush", title: "V-Half" },
  "v-min": { build: vMin, policy: "flush", title: "V-Min" },
  "dualpipe-v": { build: dualpipeV, policy: "flush", title: "DualPipeV" },
  dualpipe: { build: dualpipe, policy: "flush", title: "DualPipe" },
  chimera: { build: chimera, policy: "flush", title: "Chimera" },
};

function buildSchedule(name, p, m, v = 2) {
  const entry = SCHEDULES[name];
  if (!entry) throw new RuleError(`unknown schedule ${name}`);
  return entry.build(p, m, v);
}
