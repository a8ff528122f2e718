// The prediction of the model: tokens for masks, a class, or a class for each token.

import { data, tokenName } from './data.js';
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

export function panel() {
  const { prediction, note } = data;
  if (!prediction) return [];
  const { kind, rows, chosen } = prediction;
  const shown = kind === 'tokens' ? [tokens(rows)]
    : rows.map((row) => candidates(row, kind === 'mask' ? `${tokenName(row.place)} is` : 'The class of the text'));
  const where = kind === 'class' ? '' : ` at ${tokenName(chosen.place)}`;
  const words = note || `Gradient × attention belongs to the output “${chosen.name}”${where}.`;
  return [element('h2', {}, 'Prediction'), ...shown, element('p', { class: 'note' }, words)];
}
