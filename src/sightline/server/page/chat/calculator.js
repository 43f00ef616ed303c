// Arithmetic for the calculator, by a parser of its own: text never becomes a program. Fractions of whole numbers of any
// size are exact; a function or a broken power makes a result approximate, and the result says so.
const LONGEST = 1000; // characters of an expression
const DEEPEST = 50;
const MOST_DIGITS = 1000;
const SHOWN = 40; // digits behind the point of an exact result, and characters of a fraction
const TOKEN = /\s*(?:(\d+\.?\d*(?:e[+-]?\d{1,4})?|\.\d+(?:e[+-]?\d{1,4})?)|([a-z]\w*)|(\*\*|[-+*/^%(),×÷−]))/iy;
const SAME = { "**": "^", "×": "*", "÷": "/", "−": "-" };
const FUNCTIONS = {
  sqrt: Math.sqrt, sin: Math.sin, cos: Math.cos, tan: Math.tan, ln: Math.log, log: Math.log10, exp: Math.exp,
};
const CONSTANTS = { pi: Math.PI, e: Math.E };

export function calculated(expression) { // the result as text. Throws an Error that says what is wrong
  if (expression.length > LONGEST) throw new Error(`an expression has at most ${LONGEST} characters`);
  const parser = new Parser(tokensOf(expression));
  const value = parser.sum(0);
  if (parser.next !== undefined) throw new Error(`"${parser.next}" is not expected here`);
  return shown(value);
}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  for (let at = 0, end = text.trimEnd().length; at < end; at = TOKEN.lastIndex) {
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`"${text.slice(at).trim()[0]}" is not understood`);
    tokens.push(SAME[match[3]] ?? match[1] ?? match[2] ?? match[3]);
  }
  return tokens;
}

class Parser {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
  }
  get next() {
    return this.tokens[this.at];
  }
  takes(...wanted) { // the next token if it is one of these
    return wanted.includes(this.next) ? this.tokens[this.at++] : null;
  }
  expect(token) {
    if (!this.takes(token)) throw new Error(`"${token}" is missing`);
  }
  sum(depth) {
    if (depth > DEEPEST) throw new Error("the expression is nested too deeply");
    let value = this.product(depth);
    for (let sign; (sign = this.takes("+", "-"));) value = OPERATIONS[sign](value, this.product(depth));
    return value;
  }
  product(depth) {
    let value = this.signed(depth);
    for (let sign; (sign = this.takes("*", "/", "%"));) value = OPERATIONS[sign](value, this.signed(depth));
    return value;
  }
  signed(depth) { // -2^2 is -4
    if (depth > DEEPEST) throw new Error("the expression is nested too deeply");
    const sign = this.takes("+", "-");
    if (sign) return OPERATIONS[sign](exactly(0n), this.signed(depth + 1));
    const base = this.atom(depth);
    return this.takes("^") ? power(base, this.signed(depth + 1)) : base;
  }
  atom(depth) {
    if (this.takes("(")) {
      const value = this.sum(depth + 1);
      this.expect(")");
      return value;
    }
    const token = this.tokens[this.at++];
    if (token === undefined) throw new Error("the expression ends too early");
    if (/^[\d.]/.test(token)) return written(token);
    const name = token.toLowerCase();
    if (Object.hasOwn(CONSTANTS, name)) return about(CONSTANTS[name]);
    if (!Object.hasOwn(FUNCTIONS, name)) throw new Error(`"${token}" is not understood`);
    this.expect("(");
    const value = this.sum(depth + 1);
    this.expect(")");
    const result = about(FUNCTIONS[name](asNumber(value)));
    const square = name === "sqrt" && value.exact ? OPERATIONS["*"](result, result) : null;
    return { ...result, exact: square?.top === value.top && square.bottom === value.bottom };
  }
}

// A value is top / bottom, in lowest terms, with bottom above zero.
const OPERATIONS = {
  "+": (a, b) => fraction(a.top * b.bottom + b.top * a.bottom, a.bottom * b.bottom, a.exact && b.exact),
  "-": (a, b) => fraction(a.top * b.bottom - b.top * a.bottom, a.bottom * b.bottom, a.exact && b.exact),
  "*": (a, b) => fraction(a.top * b.top, a.bottom * b.bottom, a.exact && b.exact),
  "/": (a, b) => fraction(a.top * b.bottom, a.bottom * b.top, a.exact && b.exact),
  "%": (a, b) => { // has the sign of the divisor
    if (!b.top) throw new Error("division by zero");
    const size = a.bottom * b.bottom, by = b.top * a.bottom;
    return fraction((a.top * b.bottom % by + by) % by, size, a.exact && b.exact);
  },
};
const exactly = (top) => ({ top, bottom: 1n, exact: true });

function fraction(top, bottom, exact) {
  if (!bottom) throw new Error("division by zero");
  let divisor = top < 0n ? -top : top;
  for (let rest = bottom < 0n ? -bottom : bottom; rest;) [divisor, rest] = [rest, divisor % rest];
  if (bottom < 0n) divisor = -divisor;
  checkSize(top, bottom);
  return { top: top / divisor, bottom: bottom / divisor, exact };
}

function checkSize(...numbers) {
  const most = BigInt(Math.ceil(MOST_DIGITS * 3.33)); // bits
  if (numbers.some((number) => (number < 0n ? -number : number) >> most)) {
    throw new Error(`a number has more than ${MOST_DIGITS} digits`);
  }
}

function power(base, exponent) {
  const size = asNumber(exponent);
  if (exponent.bottom !== 1n || !exponent.exact) return about(asNumber(base) ** size);
  const digits = Math.max(String(base.top).length, String(base.bottom).length) * Math.abs(size);
  if (digits > 2 * MOST_DIGITS && (base.top * base.top > 1n || base.bottom > 1n) || Math.abs(size) > 100000) {
    throw new Error(`a number has more than ${MOST_DIGITS} digits`);
  }
  const [top, bottom] = size < 0 ? [base.bottom, base.top] : [base.top, base.bottom];
  const times = BigInt(Math.abs(size));
  return fraction(top ** times, bottom ** times, base.exact);
}

function written(text) { // a number as it was typed
  const [digits, exponent = "0"] = text.toLowerCase().split("e");
  const [whole, part = ""] = digits.split(".");
  const shift = Number(exponent) - part.length;
  if (Math.abs(shift) > MOST_DIGITS) throw new Error(`a number has more than ${MOST_DIGITS} digits`);
  const scale = 10n ** BigInt(Math.abs(shift));
  const number = BigInt(whole + part);
  return shift < 0 ? fraction(number, scale, true) : fraction(number * scale, 1n, true);
}

function about(number) {
  if (!Number.isFinite(number)) throw new Error("the result is not a finite number");
  const value = written(String(Math.abs(number)));
  return { ...value, top: number < 0 ? -value.top : value.top, exact: false };
}

function asNumber({ top, bottom }) {
  const shift = 25 + String(bottom).length - String(top).length; // for 25 digits, more than a number here can hold
  const digits = shift < 0 ? top / (bottom * 10n ** BigInt(-shift)) : top * 10n ** BigInt(shift) / bottom;
  const number = Number(`${digits}e${-shift}`);
  if (!Number.isFinite(number) || (top && !number)) throw new Error("a number is too large or too small");
  return number;
}

function shown(value) {
  const decimal = value.exact ? decimalOf(value) : null;
  if (decimal) return decimal;
  const number = "about " + Number(asNumber(value).toPrecision(15));
  const fraction = `${value.top}/${value.bottom}`;
  return value.exact && fraction.length <= SHOWN ? `${fraction}, ${number}` : number;
}

function decimalOf({ top, bottom }) { // null if it does not end soon
  const size = top < 0n ? -top : top;
  let digits = "", rest = size % bottom;
  for (; rest && digits.length < SHOWN; rest %= bottom) {
    rest *= 10n;
    digits += rest / bottom;
  }
  return rest ? null : (top < 0n ? "-" : "") + size / bottom + (digits && "." + digits);
}
