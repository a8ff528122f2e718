// The attention of a token, or of all tokens, over the words; the pieces of a word are joined.

import { data, format, length, PADDING, sides, tokenName, windowNote } from '../data.js';
import { element, isDark, keys, perFrame, shortened, vector } from '../dom.js';
import { css, heat, ink } from '../colour.js';
import { mean, planesOf } from '../planes.js';
import { change, tokenKeys } from '../state.js';

export const label = 'Text';
let drawn = null;

// Units of the text: words with their pieces, special tokens one by one, padding as a whole.
function unitsOfText() {
  const units = [];
  const words = new Map();
  data.words.forEach((word, token) => {
    const sentence = data.sentences[token];
    if (word !== null && words.has(word)) words.get(word).tokens.push(token);
    else if (sentence === PADDING && units.at(-1)?.sentence === PADDING) units.at(-1).tokens.push(token);
    else {
      const surface = word === null ? data.tokens[token] : data.surfaces[word] || data.tokens[token];
      const unit = { text: surface, tokens: [token], sentence };
      if (word !== null) words.set(word, unit);
      units.push(unit);
    }
  });
  for (const unit of units) if (unit.sentence === PADDING) unit.text = `padding × ${unit.tokens.length}`;
  return units;
}

export const UNITS = unitsOfText();
const unitOf = (token) => UNITS.find(({ tokens }) => tokens.includes(token));
const real = data.tokens.map((_, token) => token).filter((token) => data.sentences[token] !== PADDING);

// A word receives the sum of what its pieces receive, and sends the mean of what they send.
export function received(values, state) {
  const senders = state.token >= 0 ? unitOf(state.token).tokens : real;
  const pass = sides(state.pairs);
  return UNITS.map(({ tokens }) => {
    let sum = 0;
    for (const query of senders) {
      if (!pass.queries[query]) continue;
      for (const key of tokens) if (pass.keys[key]) sum += values[query * length + key];
    }
    return sum / senders.length;
  });
}

// A pointer on a word shows what the word attends to, as long as it is there.
function word(unit) {
  if (unit.sentence === PADDING) return element('span', { class: 'word padding' }, unit.text);
  return element('button', {
    class: 'word', type: 'button', onclick: () => change({ token: unit === chosen() ? -1 : unit.tokens[0] }),
    onpointerenter: () => preview(unit.tokens[0]), onpointerleave: () => preview(null),
  }, unit.text);
}

const chosen = () => (drawn.state.token >= 0 ? unitOf(drawn.state.token) : null);

function preview(token) {
  drawn.hovered = token;
  drawn.again();
}

// Moves the query and the focus to the next word, or to the one before.
function move(by) {
  const words = UNITS.filter(({ sentence }) => sentence !== PADDING);
  const at = chosen() === null ? -1 : words.indexOf(chosen());
  const next = words[Math.max(0, Math.min(words.length - 1, at + by))];
  change({ token: next.tokens[0] });
  drawn.nodes[UNITS.indexOf(next)].focus();
}

function build(panel) {
  const nodes = UNITS.map(word);
  const moves = keys({ ArrowLeft: () => move(-1), ArrowRight: () => move(1), Escape: tokenKeys.Escape });
  panel.replaceChildren(element('div', { class: 'words', role: 'group', 'aria-label': 'The text; a word shows what it attends to, left and right choose a word', ...moves }, nodes));
  return { nodes, hovered: null, again: perFrame(paint) };
}

// Colours the words by what they receive from the query token.
function paint() {
  const { nodes, state } = drawn;
  const values = received(drawn.plane, { ...state, token: drawn.hovered ?? state.token });
  const most = Math.max(...values) || 1;
  const dark = isDark();
  UNITS.forEach((unit, at) => {
    const node = nodes[at];
    const colour = heat(values[at] / most, dark);
    node.style.background = css(colour);
    node.style.color = ink(colour);
    node.title = format(values[at]);
    node.classList.toggle('chosen', unit === chosen());
    if (unit.sentence === PADDING) return;
    node.tabIndex = unit === (chosen() ?? UNITS[0]) ? 0 : -1;
    node.setAttribute('aria-pressed', String(unit === chosen()));
    node.setAttribute('aria-label', `${unit.text}: ${format(values[at])}`);
  });
  Object.assign(drawn, { values, most });
}

export const load = async (state) => mean(await planesOf(state));

export function show(panel, state, plane) {
  drawn ??= build(panel);
  // A new query token is shown even if the pointer rests on another word.
  if (drawn.state?.token !== state.token) drawn.hovered = null;
  Object.assign(drawn, { plane, state, width: Math.min(panel.clientWidth, 900) });
  paint();
  const values = received(plane, state);
  const from = state.token >= 0 ? `From “${unitOf(state.token).text}”` : 'On average over all tokens';
  const order = values.map((_, at) => at).sort((a, b) => values[b] - values[a]);
  return {
    summary: `${from}, most goes to “${UNITS[order[0]].text}” (${format(values[order[0]])}), which has the strongest colour.${windowNote(state)}`,
    picture, header: ['word', 'tokens', 'value'],
    rows: order.slice(0, 10).map((at) => [UNITS[at].text, UNITS[at].tokens.slice(0, 4).map(tokenName).join(' '), format(values[at])]),
  };
}

function picture() {
  const { values, most, width } = drawn;
  const pen = document.createElement('canvas').getContext('2d');
  pen.font = '15px system-ui, sans-serif';
  let [x, y] = [8, 8];
  const nodes = UNITS.flatMap((unit, at) => {
    const text = shortened(unit.text, 60);
    const wide = pen.measureText(text).width + 10;
    if (x + wide > width) [x, y] = [8, y + 30];
    const colour = heat(values[at] / most, isDark());
    const found = [
      vector('rect', { x, y, width: wide, height: 24, rx: 4, fill: css(colour) }),
      vector('text', { x: x + 5, y: y + 17, 'font-size': 15, style: `fill:${ink(colour)}` }, text),
    ];
    x += wide + 4;
    return found;
  });
  return { width, height: y + 36, nodes };
}
