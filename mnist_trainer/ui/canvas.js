// The drawing canvas and what the network says of it. Streamlit calls the default export after every rerun.
//
// Out: state "drawing" = {seq, strokes}, strokes as lists of [x, y, width] in units of a 280-wide canvas.
// In:  data = {seq, probabilities, image}: what became of the drawing with that number; null for an empty one.

const SIZE = 280
const NEAR = 1.5 // units between two points of a stroke
const SEND_EVERY = 120 // ms while the pen moves; a finished stroke is sent at once
const ANSWER_BY = 1000 // ms after which an unanswered drawing is taken for lost
const STORED = "mnist-trainer-drawing" // survives reruns, page changes and reloads of this tab

const pads = new WeakMap() // mounted element -> Pad

class Pad {
  constructor(root) {
    const find = selector => root.querySelector(selector)
    this.root = root
    this.canvas = find(".pad canvas")
    this.context = this.canvas.getContext("2d")
    this.undoButton = find(".undo")
    this.clearButton = find(".clear")
    this.brush = find(".brush")
    this.digit = find(".digit")
    this.sure = find(".sure")
    this.seen = find(".seen canvas").getContext("2d")
    this.bars = this.createBars(find(".bars"))

    this.seq = 0 // number of the newest drawing sent
    this.answered = 0 // number of the newest one answered
    this.emptied = 0 // number of the last empty one: answers to earlier drawings are stale
    this.sentAt = 0
    this.timer = 0
    this.pointer = null // id of the one that draws: a resting palm does not
    this.strokes = this.restore()

    this.canvas.onpointerdown = event => this.begin(event)
    this.canvas.onpointermove = event => this.extend(event)
    this.canvas.onpointerup = this.canvas.onpointercancel = event => this.end(event)
    this.undoButton.onclick = () => this.edit(this.strokes.slice(0, -1))
    this.clearButton.onclick = () => this.edit([])
    this.onKey = event => this.key(event)
    document.addEventListener("keydown", this.onKey)
    this.resizes = new ResizeObserver(() => this.resize())
    this.resizes.observe(this.canvas)
  }

  createBars(list) {
    return Array.from({ length: 10 }, (_, digit) => {
      const bar = document.createElement("div")
      bar.className = "bar"
      bar.setAttribute("role", "listitem")
      bar.innerHTML = `<span>${digit}</span><div class="track"><div class="fill"></div></div><span class="percent">–</span>`
      list.append(bar)
      return bar
    })
  }

  // --- drawing ---

  begin(event) {
    if (this.pointer !== null || event.button) return
    event.preventDefault()
    this.canvas.focus({ preventScroll: true })
    this.canvas.setPointerCapture(event.pointerId) // a stroke that leaves the canvas goes on
    this.pointer = event.pointerId
    this.strokes.push([this.point(event)])
    this.paint()
    this.sendSoon()
  }

  extend(event) {
    if (event.pointerId !== this.pointer) return
    const events = event.getCoalescedEvents?.() ?? []
    const stroke = this.strokes.at(-1)
    for (const each of events.length ? events : [event]) {
      const point = this.point(each)
      const [x, y] = stroke.at(-1)
      if (Math.hypot(point[0] - x, point[1] - y) < NEAR) continue // a fast mouse sends a thousand a second
      stroke.push(point)
      this.paintSegment(stroke, stroke.length - 1) // what is there stays: a long drawing costs no more than a short one
    }
    this.sendSoon()
  }

  end(event) {
    if (event.pointerId !== this.pointer) return
    this.pointer = null
    this.edit(this.strokes)
  }

  edit(strokes) {
    if (this.pointer !== null) return
    this.strokes = strokes
    this.paint()
    this.store()
    this.send()
  }

  key(event) {
    const path = event.composedPath()
    if (path.some(element => element instanceof HTMLElement && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName)))) return
    const isUndo = (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z"
    const isClear = path.includes(this.canvas) && (event.key === "Delete" || event.key === "Backspace")
    const button = isUndo ? this.undoButton : isClear ? this.clearButton : null
    if (!button) return
    event.preventDefault()
    event.stopPropagation()
    button.click()
  }

  // Where the pointer is, from the canvas's real box: right when scrolled, zoomed, or at any pixel ratio.
  point(event) {
    const box = this.canvas.getBoundingClientRect()
    const round = value => Math.round(value * 10) / 10
    const pressure = event.pointerType === "pen" && event.pressure ? 0.5 + event.pressure : 1
    return [
      round(((event.clientX - box.left) / box.width) * SIZE),
      round(((event.clientY - box.top) / box.height) * SIZE),
      round(this.brush.value * pressure),
    ]
  }

  paint() {
    const { context, canvas } = this
    const scale = canvas.width / SIZE
    context.setTransform(scale, 0, 0, scale, 0, 0)
    context.clearRect(0, 0, SIZE, SIZE)
    context.lineCap = context.lineJoin = "round"
    context.strokeStyle = "#fff"
    for (const stroke of this.strokes) for (let i = 0; i < stroke.length; i++) this.paintSegment(stroke, i)
    this.undoButton.disabled = this.clearButton.disabled = !this.strokes.length
  }

  paintSegment(stroke, i) {
    const [fromX, fromY] = stroke[Math.max(0, i - 1)]
    const [x, y, width] = stroke[i]
    this.context.lineWidth = width
    this.context.beginPath()
    this.context.moveTo(fromX, fromY)
    this.context.lineTo(i ? x : x + 0.01, y) // a dot is a very short line
    this.context.stroke()
  }

  resize() {
    const pixels = Math.round(this.canvas.clientWidth * devicePixelRatio)
    if (!pixels || pixels === this.canvas.width) return
    this.canvas.width = this.canvas.height = pixels
    this.paint()
  }

  // --- to and from the server ---

  // While the pen moves: not too often, and one drawing under way at a time.
  sendSoon() {
    if (this.timer) return
    this.timer = setTimeout(() => {
      this.timer = 0
      const isFree = this.answered >= this.seq || performance.now() - this.sentAt > ANSWER_BY
      isFree ? this.send() : this.sendSoon()
    }, SEND_EVERY)
  }

  send() {
    clearTimeout(this.timer)
    this.timer = 0
    this.seq += 1
    this.sentAt = performance.now()
    if (!this.strokes.length) {
      this.emptied = this.seq
      this.show({ probabilities: null, image: null }) // image, bars and answer go with the ink, at once
    }
    this.setState("drawing", { seq: this.seq, strokes: this.strokes })
  }

  update(data, setState) {
    this.setState = setState
    const isNew = this.seq === 0
    this.answered = data.seq
    this.seq = Math.max(this.seq, data.seq) // a pad mounted anew goes on counting
    if (isNew && this.strokes.length) this.send() // the server may have forgotten it: a reload
    else if (data.seq >= this.emptied) this.show(data)
  }

  show({ probabilities, image }) {
    const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1
    const percent = value => (value > 0.9995 ? "> 99.9%" : `${(100 * value).toFixed(1)}%`) // certainty is never whole
    this.digit.textContent = probabilities ? best : "–"
    this.sure.textContent = probabilities ? percent(probabilities[best]) : "Draw a digit."
    this.bars.forEach((bar, digit) => {
      const text = probabilities ? percent(probabilities[digit]) : "–"
      bar.classList.toggle("top", digit === best)
      bar.setAttribute("aria-label", `${digit}: ${text}`)
      bar.querySelector(".fill").style.width = probabilities ? `${100 * probabilities[digit]}%` : "0"
      bar.querySelector(".percent").textContent = text
    })
    const pixels = new ImageData(28, 28)
    const grey = image ? atob(image) : ""
    for (let i = 0; i < grey.length; i++) pixels.data.fill(grey.charCodeAt(i), 4 * i, 4 * i + 3)
    for (let i = 3; i < pixels.data.length; i += 4) pixels.data[i] = 255
    this.seen.putImageData(pixels, 0, 0)
  }

  // --- across reloads ---

  store() {
    try {
      sessionStorage.setItem(STORED, JSON.stringify(this.strokes))
    } catch {
      // Storage is off or full: the drawing lives as long as the page.
    }
  }

  restore() {
    try {
      return JSON.parse(sessionStorage.getItem(STORED)) ?? []
    } catch {
      return []
    }
  }

  remove() {
    clearTimeout(this.timer)
    this.resizes.disconnect()
    document.removeEventListener("keydown", this.onKey)
  }
}

export default function ({ parentElement, data, setStateValue }) {
  let pad = pads.get(parentElement)
  if (!pad) pads.set(parentElement, (pad = new Pad(parentElement)))
  pad.update(data, setStateValue)
  // Streamlit also runs the clean-up of a call that a newer one overtook: remove only what has left the page.
  return () =>
    setTimeout(() => {
      if (pad.canvas.isConnected) return
      pad.remove()
      pads.delete(parentElement)
    })
}
