"""The mistakes that ``make mutate-viewer`` inserts into the page of ``fastbert view``.

Each fault is one wrong expression in a source of the page: a number, a position, a colour, a key or
a label. The page is built with the fault, and a browser test must fail.
"""

from __future__ import annotations

from faults import Fault

WEB = "fastbert/viewer/web/src"
BROWSER = "tests/viewer/test_viewer_browser.py"
CONTROLS = "tests/viewer/test_viewer_controls.py"
VALUES = "tests/viewer/test_viewer_values.py"

# Noun → the tests that run with each fault of the noun; at least one of them must fail.
PAGE_SELECTIONS: dict[str, list[str]] = {
    "numbers": [
        VALUES,
        "-k",
        "largest_values or mean or cells or words_receive or filter or neuron_view or measures",
    ],
    "pictures": [VALUES, "-k", "lighter or lines or vectors or stronger"],
    "limits": [VALUES, "-k", "window or answer or gradients_of_their_own or long_text"],
    "links": [BROWSER, "-k", "link or picture or sorting or sentences"],
    "accessibility": [BROWSER, "-k", "accessibility and light"],
    "controls": [CONTROLS],
    "page": ["tests/viewer/test_viewer_page.py"],
}


def fault(name: str, noun: str, file: str, old: str, new: str) -> Fault:
    return Fault(f"page: {name}", noun, f"{WEB}/{file}", old, new)


PAGE_FAULTS = [
    # Faults of quantization, and of the numbers in a plane
    fault("codes are not squared", "numbers", "planes.js",
          "(_, code) => (code / levels) ** 2", "(_, code) => code / levels"),
    fault("queries and keys are swapped", "numbers", "planes.js",
          "plane[query * length + key] = values[codes[column + query]]",
          "plane[key * length + query] = values[codes[column + query]]"),
    fault("every head is head 0", "numbers", "planes.js",
          "head * size, weightValues)", "0, weightValues)"),
    fault("norms have another scale", "numbers", "planes.js",
          "normScale / 65535", "normScale / 64000"),
    fault("norms of head 0", "numbers", "planes.js",
          "norm[head * length + (i % length)]", "norm[i % length]"),
    fault("gradients of head 0", "numbers", "planes.js", "(head ?? 0) * size", "0 * size"),
    fault("gradients have the scale of layer 0", "numbers", "planes.js",
          "data.layers[layer].relevanceScale", "data.layers[0].relevanceScale"),
    fault("rollout has another residual", "numbers", "planes.js", "+= 0.5;", "+= 0.45;"),
    fault("the mean is the sum", "numbers", "planes.js", "value / found.length", "value"),
    fault("vectors of head 0", "numbers", "planes.js",
          "codes.subarray(head * length * width, (head + 1) * length * width)",
          "codes.subarray(0, length * width)"),
    fault("thumbnails of another layer", "pictures", "planes.js",
          "(layer * heads + head) * size)", "(head * heads + layer) * size)"),
    fault("a block is read once more than it is long", "controls", "data.js",
          "if (!unpacked.has(name)) unpacked.set(name, inflate(name));",
          "if (!unpacked.has('a')) unpacked.set(name, inflate('weights-0'));"),
    # Faults of sentences, windows and padding
    fault("a to b shows b to a", "links", "data.js",
          "{ queries: side(filter[0]), keys: side(filter[1]) }",
          "{ queries: side(filter[1]), keys: side(filter[0]) }"),
    fault("a window ends one token early", "limits", "data.js",
          "Math.abs(query - key) <= window", "Math.abs(query - key) < window"),
    fault("a window limits rollout", "limits", "data.js",
          "quantity === 'rollout' ? null : data", "quantity === 'none' ? null : data"),
    fault("padding is not hidden", "pictures", "data.js",
          "if (!exists[query] || !exists[key]) return false;", ""),
    fault("words count the sum of their pieces as senders", "numbers", "views/text.js",
          "return sum / senders.length", "return sum"),
    fault("the answer starts at its end", "limits", "prediction.js",
          "at === 0 ? 'The answer starts at'", "at === 1 ? 'The answer starts at'"),
    # Faults of the state and the link
    fault("heads are lost in the link", "links", "state.js",
          "heads: state.heads.join('.') })", "heads: state.heads.join(',') })"),
    fault("the link loses the order", "links", "state.js",
          "given.get('sort')", "given.get('order')"),
    fault("a changed link changes nothing", "controls", "state.js",
          "change(parse(location.hash)))", "change({}))"),
    fault("the link is not written", "controls", "state.js",
          "history.replaceState(null, '', hash());", ""),
    fault("the right arrow goes back", "controls", "state.js",
          "ArrowRight: () => step(1)", "ArrowRight: () => step(-1)"),
    # Faults of pictures and files
    fault("saved lines are level", "pictures", "views/head.js",
          "L${width.right},${middle(to[line])}", "L${width.right},${middle(from[line])}"),
    fault("drawn lines are level", "pictures", "views/head.js",
          "pen.lineTo(width.right, middle(to[line]) - box.scrollTop)",
          "pen.lineTo(width.right, middle(from[line]) - box.scrollTop)"),
    fault("the opacity has one step more", "pictures", "views/head.js",
          "* STEPS + 0.5 | 0", "* STEPS + 1 | 0"),
    fault("a saved PNG is empty", "links", "save.js",
          "drawImage(image, 0, 0, canvas.width, canvas.height)", "drawImage(image, 0, 0, 1, 1)"),
    fault("the name of a file lacks the view", "links", "main.js",
          "`attention-${state.view}-$", "`attention-$"),
    # Colours
    fault("large weights are dark", "pictures", "colour.js",
          "CIVIDIS_PIXELS[index(Math.sqrt(share))]", "CIVIDIS_PIXELS[index(1 - share)]"),
    fault("positive numbers are orange", "pictures", "colour.js",
          "index((1 - value) / 2)", "index((1 + value) / 2)"),
    fault("words are pale in the dark", "pictures", "colour.js",
          "dark ? 1 - Math.sqrt(share)", "dark ? Math.sqrt(share)"),
    fault("heads have the colour of the next head", "pictures", "colour.js",
          "OKABE_ITO[head % OKABE_ITO.length]", "OKABE_ITO[(head + 1) % OKABE_ITO.length]"),
    fault("white text on light colours", "accessibility", "colour.js",
          "light > 0.179", "light > 0.7"),
    fault("thumbnails are not painted", "pictures", "views/model.js",
          "pen.putImageData(image, 0, 0);", ""),
    # Measures
    fault("the smallest measure comes first", "links", "measures.js",
          "headValue(sort, b.layer, b.head) - headValue(sort, a.layer, a.head)",
          "headValue(sort, a.layer, a.head) - headValue(sort, b.layer, b.head)"),
    fault("shares are per mille", "numbers", "measures.js", "(100 * value)", "(1000 * value)"),
    fault("a head of the table opens the layer after it", "controls", "measures.js",
          "change({ layer, heads: [head] })", "change({ layer: layer - 1, heads: [head] })"),
    # Faults of keys, pointers and zoom
    fault("End goes beyond the last thumbnail", "controls", "views/model.js",
          "count - 1", "count"),
    fault("shift moves five cells", "controls", "views/matrix.js",
          "event.shiftKey ? 10 : 1", "event.shiftKey ? 5 : 1"),
    fault("zoom does not keep the cell under the pointer", "controls", "views/matrix.js",
          "x: x + (k - 1) * MARGIN", "x"),
    fault("a pointer that left still has its lines", "controls", "views/head.js",
          "onpointerleave: () => hover(-1)", "onpointerleave: () => {}"),
    fault("products with another query", "numbers", "views/neuron.js",
          "found.queries[query * size + i]", "found.queries[i]"),
    fault("keys keep their native effect only", "controls", "dom.js",
          "      work(event);\n", ""),
    fault("the button keeps the theme", "controls", "main.js",
          "isDark() ? 'light' : 'dark'", "isDark() ? 'dark' : 'light'"),
    # Faults of labels for assistive software
    fault("a select has no label", "accessibility", "dom.js",
          "element('label', { for: id }, label)", "element('label', {}, label)"),
    fault("a tab is a button", "accessibility", "main.js", "role: 'tab', id", "role: 'button', id"),
    fault("the measures cannot be focused", "controls", "measures.js",
          "class: 'scroll measures', tabindex: 0,", "class: 'scroll measures',"),
    fault("the matrix has no name", "accessibility", "views/matrix.js",
          "'aria-label': 'Matrix of queries and keys; the arrow keys move the cell, plus and minus "
          "zoom',", ""),
    fault("the page may load anything", "page", "page.html", "default-src 'none'", "default-src *"),
]  # fmt: skip
