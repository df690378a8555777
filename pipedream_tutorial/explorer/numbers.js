// Exact numbers: durations stay fractions, as in the Python simulator.
"use strict";

function gcd(a, b) {
  a = a < 0n ? -a : a;
  b = b < 0n ? -b : b;
  while (b) [a, b] = [b, a % b];
  return a;
}

function lcm(a, b) {
  return (a / gcd(a, b)) * b;
}

class Fraction {
  constructor(numerator, denominator = 1n) {
    const sign = denominator < 0n ? -1n : 1n;
    const common = gcd(numerator, denominator) || 1n;
    this.n = (sign * numerator) / common;
    this.d = (sign * denominator) / common;
  }

  // 2, "2", "0.5", "1e-3" and "1/3" are kept exactly; null for what is no number.
  static parse(value) {
    if (value instanceof Fraction) return value;
    const text = String(value).trim();
    const quotient = /^([+-]?\d{1,15})\/(\d{1,15})$/.exec(text);
    if (quotient) {
      const below = BigInt(quotient[2]);
      return below ? new Fraction(BigInt(quotient[1]), below) : null;
    }
    const decimal = /^([+-]?)(\d{0,20})\.?(\d{0,20})(?:e([+-]?\d{1,2}))?$/i.exec(text);
    if (!decimal || !(decimal[2] + decimal[3])) return null;
    const power = Number(decimal[4] ?? 0) - decimal[3].length;
    const digits = BigInt(decimal[1] + decimal[2] + decimal[3]);
    return power < 0
      ? new Fraction(digits, 10n ** BigInt(-power))
      : new Fraction(digits * 10n ** BigInt(power));
  }

  plus(other) {
    return new Fraction(this.n * other.d + other.n * this.d, this.d * other.d);
  }

  minus(other) {
    return new Fraction(this.n * other.d - other.n * this.d, this.d * other.d);
  }

  times(other) {
    return new Fraction(this.n * other.n, this.d * other.d);
  }

  over(other) {
    return new Fraction(this.n * other.d, this.d * other.n);
  }

  compare(other) {
    const difference = this.n * other.d - other.n * this.d;
    return difference < 0n ? -1 : difference > 0n ? 1 : 0;
  }

  toNumber() {
    return Number(this.n) / Number(this.d);
  }

  // As Python writes a Fraction: 33, 67/2.
  toString() {
    return this.d === 1n ? String(this.n) : `${this.n}/${this.d}`;
  }
}

const ONE = new Fraction(1n);

function whole(number) {
  return new Fraction(BigInt(number));
}

// At most two decimals and none that are zeros: 33, 5.5, 2.33; 1e+6 and 1e-3 as such.
function shortNumber(value) {
  const shown = Number(value);
  if (shown && (Math.abs(shown) < 0.01 || Math.abs(shown) >= 1e5)) return shown.toPrecision(3);
  return String(Math.round(shown * 100) / 100);
}

// A share as "27%"; below 10% with one decimal unless that is a zero.
function percent(share) {
  const value = 100 * Number(share);
  return (Math.abs(value) < 9.95 ? String(Math.round(value * 10) / 10) : value.toFixed(0)) + "%";
}

// Mulberry32: a small generator of numbers in [0, 1), the same in every browser for the same seed.

function generator(seed) {
  let state = seed + 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// `count` normal numbers times `scale`.
function normals(chance, count, scale) {
  return Float64Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - chance()));
    return scale * radius * Math.cos(2 * Math.PI * chance());
  });
}
