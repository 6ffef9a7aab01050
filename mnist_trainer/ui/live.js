// A run as it learns: progress, figures and Plotly charts, each updated in place.
// Streamlit calls the default export after every rerun.

const panels = new WeakMap() // mounted element -> LivePanel
const IS_TOUCH = matchMedia("(hover: none)").matches // a finger scrolls the page: it does not zoom the chart
let plotlyLoading = null // one <script> serves all charts of the page

function loadPlotly(url) {
  if (window.Plotly) return Promise.resolve(window.Plotly)
  plotlyLoading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script")
    script.src = new URL(url, document.baseURI)
    script.onload = () => resolve(window.Plotly)
    script.onerror = () => {
      plotlyLoading = null // the network was away: the next update tries again
      script.remove()
      reject(new Error("plotly.js could not be loaded"))
    }
    document.head.append(script)
  })
  return plotlyLoading
}

function themeColors(element) {
  return getComputedStyle(element).getPropertyValue("--st-chart-categorical-colors").trim().split(",")
}

class LiveChart {
  constructor(element) {
    this.element = element
    this.data = null
    this.isDrawing = false
    this.isDrawn = false
    this.isGone = false
    this.resizes = new ResizeObserver(() => {
      if (this.isDrawn && !this.isDrawing && element.clientWidth) this.plotly.Plots.resize(element)
    })
    this.resizes.observe(element)
    // A change of theme changes the custom properties of an ancestor, and reruns nothing.
    this.themes = setInterval(() => {
      if (this.isDrawn && this.theme !== this.readTheme()) this.draw()
    }, 500)
  }

  update(data) {
    this.data = data
    this.element.style.height = `${data.layout.height ?? data.height}px` // at once, so that the page does not jump later
    this.element.classList.toggle("wide", data.isWide)
    this.element.setAttribute("role", "img")
    this.element.setAttribute("aria-label", data.description)
    this.draw()
  }

  property(name) {
    return getComputedStyle(this.element).getPropertyValue(`--st-${name}`).trim()
  }

  readTheme() {
    return ["text-color", "border-color", "font", "background-color", "chart-categorical-colors"].map(name => this.property(name)).join("|")
  }

  // Draws the newest data; data that arrives meanwhile is drawn next, and what it overtakes is skipped.
  async draw() {
    if (this.isDrawing) return
    this.isDrawing = true
    try {
      this.plotly = await loadPlotly(this.data.plotlyUrl)
      let drawn = null
      while (drawn !== this.data && !this.isGone) {
        drawn = this.data
        this.theme = this.readTheme()
        await this.plotly.react(this.element, this.traces(drawn), this.layout(drawn), {
          displaylogo: false,
          displayModeBar: IS_TOUCH ? false : "hover",
          modeBarButtonsToRemove: ["sendChartToCloud", "lasso2d", "select2d"],
        })
        this.isDrawn = true
      }
    } catch (error) {
      console.warn(error.message)
    } finally {
      this.isDrawing = false
    }
  }

  traces(data) {
    const colors = themeColors(this.element)
    return data.traces.map(({ color, line, marker, ...trace }) => ({
      type: "scatter",
      mode: "lines",
      ...trace,
      line: { ...line, color: colors[color] },
      marker: { ...marker, color: colors[color] },
    }))
  }

  layout(data) {
    const axis = { gridcolor: this.property("border-color-light"), linecolor: this.property("border-color"), zeroline: false, automargin: true }
    return {
      uirevision: data.revision,
      height: data.height,
      margin: { l: 64, r: 16, t: 0, b: 48 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: this.property("text-color"), family: this.property("font"), size: 15 },
      hoverlabel: { bgcolor: this.property("background-color"), font: { color: this.property("text-color") }, namelength: -1 },
      hovermode: "x",
      dragmode: IS_TOUCH ? false : "zoom",
      modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: "#8a93a3", activecolor: this.property("text-color") }, // beside the legend
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      ...data.layout,
      shapes: data.layout.shapes?.map(shape => ({ line: { width: 1, dash: "dot", color: this.property("text-color") }, opacity: 0.6, ...shape })),
      annotations: data.layout.annotations?.map(note => ({ xanchor: "left", yanchor: "top", font: { size: 13 }, ...note })),
      xaxis: { ...axis, ...data.layout.xaxis },
      yaxis: { ...axis, ...data.layout.yaxis, minor: { gridcolor: axis.gridcolor, showgrid: false, ...data.layout.yaxis?.minor } },
    }
  }

  remove() {
    this.isGone = true
    clearInterval(this.themes)
    this.resizes.disconnect()
    if (this.isDrawn) this.plotly.purge(this.element)
  }
}

function newElement(name, className = "") {
  const element = document.createElement(name)
  element.className = className
  return element
}

// Gives `list` so many children, made by `make`; those that stay are updated in place.
function resize(list, count, make) {
  while (list.children.length > count) list.lastChild.remove()
  while (list.children.length < count) list.append(make())
}

function newPanel() {
  const panel = newElement("section", "panel")
  const bar = newElement("div", "bar")
  bar.setAttribute("role", "progressbar")
  bar.setAttribute("aria-valuemin", 0)
  bar.setAttribute("aria-valuemax", 100)
  bar.append(newElement("div"))
  const progress = newElement("div", "progress")
  progress.append(newElement("div", "text"), bar)
  panel.append(newElement("h3", "title"), progress, newElement("dl"))
  return panel
}

function newTile() {
  const tile = newElement("div")
  tile.append(newElement("dt"), newElement("dd", "value"), newElement("dd", "below"))
  return tile
}

function updatePanel(element, { title, tiles, progress, color }) {
  const [heading, progressElement, list] = element.children
  heading.textContent = title
  heading.hidden = !title
  progressElement.hidden = !progress
  if (progress) {
    const [share, text] = progress
    const [textElement, bar] = progressElement.children
    textElement.textContent = text
    bar.firstChild.style.width = `${100 * share}%`
    bar.firstChild.style.background = themeColors(element)[color] ?? ""
    bar.setAttribute("aria-valuenow", Math.round(100 * share))
    bar.setAttribute("aria-valuetext", text)
  }
  resize(list, tiles.length, newTile)
  tiles.forEach((texts, i) => texts.forEach((text, j) => (list.children[i].children[j].textContent = text)))
}

class LivePanel {
  constructor(root) {
    this.root = root
    this.charts = []
  }

  update({ panels, isLarge, ...data }) {
    this.root.classList.toggle("large", isLarge)
    const place = this.root.querySelector(".panels")
    resize(place, panels.length, newPanel)
    panels.forEach((panel, i) => updatePanel(place.children[i], panel))
    this.updateCharts(data)
  }

  updateCharts({ charts, ...shared }) {
    const place = this.root.querySelector(".charts")
    while (this.charts.length > charts.length) {
      const chart = this.charts.pop()
      chart.remove()
      chart.element.remove()
    }
    while (this.charts.length < charts.length) {
      const element = document.createElement("div")
      element.className = "live-chart"
      place.append(element)
      this.charts.push(new LiveChart(element))
    }
    charts.forEach((chart, i) => this.charts[i].update({ ...shared, ...chart }))
  }

  remove() {
    this.charts.forEach(chart => chart.remove())
  }
}

export default function ({ parentElement, data }) {
  let panel = panels.get(parentElement)
  if (!panel) panels.set(parentElement, (panel = new LivePanel(parentElement.querySelector(".live"))))
  panel.update(data)
  // Streamlit also runs the clean-up of a call that a newer one overtook: remove only what has left the page.
  return () =>
    setTimeout(() => {
      if (panel.root.isConnected) return
      panel.remove()
      panels.delete(parentElement)
    })
}
