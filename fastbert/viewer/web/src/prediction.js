// The prediction of the model: tokens for masks, a class, a class for each token, or an answer.

import { data, length, tokenName } from './data.js';
import { element } from './dom.js';

const percent = (share) => (share > 0 && share < 0.0005 ? '< 0.1 %' : `${(100 * share).toFixed(1)} %`);

function candidates({ place, candidates: found }, title) {
  return element('table', {},
    element('caption', {}, title),
    element('thead', {}, element('tr', {}, ['prediction', 'probability'].map((text) => element('th', { scope: 'col' }, text)))),
    element('tbody', {}, found.map(({ name, probability }) => element('tr', {},
      element('th', { scope: 'row' }, name),
      element('td', { class: 'bar', style: `--share:${Math.max(0, Math.min(1, probability))}` }, found.length > 1 ? percent(probability) : probability.toFixed(3))))));
}

function tokens(rows) {
  const cells = rows.map(({ place, candidates: [first] }) => element('tr', {},
    element('th', { scope: 'row' }, tokenName(place)), element('td', {}, first.name), element('td', {}, percent(first.probability))));
  return element('div', { class: 'scroll measures', tabindex: 0, role: 'region', 'aria-label': 'Predicted classes' },
    element('table', {},
      element('caption', {}, 'The likeliest class of each token'),
      element('thead', {}, element('tr', {}, ['token', 'class', 'probability'].map((text) => element('th', { scope: 'col' }, text)))),
      element('tbody', {}, cells)));
}

const TITLES = {
  mask: ({ place }) => `${tokenName(place)} is`,
  class: () => 'The class of the text',
  span: (_, at) => (at === 0 ? 'The answer starts at' : 'The answer ends at'),
};

const OUTPUTS = {
  mask: ({ name, place }) => `the output “${name}” at ${tokenName(place)}`,
  class: ({ name }) => `the output “${name}”`,
  tokens: ({ name, place }) => `the output “${name}” at ${tokenName(place)}`,
  span: ({ label, place }) => `the logits that the answer starts at ${tokenName(label)} and ends at ${tokenName(place)}`,
};

// Says which output has the gradient, and why the heads are joined if they are.
function gradient({ kind, chosen }) {
  const words = `Gradient × attention belongs to ${OUTPUTS[kind](chosen)}.`;
  if (data.relevanceByHead !== false) return words;
  return `${words} It is the mean over the heads, because that of each head would make this file of ${length} tokens larger than ${data.limit}.`;
}

export function panel() {
  const { prediction, note } = data;
  if (!prediction) return [];
  const { kind, rows, chosen } = prediction;
  const shown = kind === 'tokens' ? [tokens(rows)] : rows.map((row, at) => candidates(row, TITLES[kind](row, at)));
  const answer = kind === 'span' ? [element('p', {}, `Answer: ${chosen.name}`)] : [];
  return [element('h2', {}, 'Prediction'), ...answer, ...shown, element('p', { class: 'note' }, note || gradient(prediction))];
}
