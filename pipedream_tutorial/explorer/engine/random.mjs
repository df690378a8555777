// Mulberry32: a small generator of numbers in [0, 1), the same in every browser for the same seed.

export function generator(seed) {
  let state = seed + 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// `count` normal numbers times `scale`.
export function normals(chance, count, scale) {
  return Float64Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - chance()));
    return scale * radius * Math.cos(2 * Math.PI * chance());
  });
}
