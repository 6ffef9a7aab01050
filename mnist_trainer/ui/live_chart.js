// A Plotly chart on a stable element. Streamlit calls the default export after every rerun.

const charts = new WeakMap() // mounted element -> LiveChart
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
    this.element.style.height = `${data.height}px` // at once, so that the page does not jump later
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
    const colors = this.property("chart-categorical-colors").split(",")
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
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      ...data.layout,
      xaxis: { ...axis, ...data.layout.xaxis },
      yaxis: { ...axis, ...data.layout.yaxis },
    }
  }

  remove() {
    this.isGone = true
    clearInterval(this.themes)
    this.resizes.disconnect()
    if (this.isDrawn) this.plotly.purge(this.element)
  }
}

export default function ({ parentElement, data }) {
  let chart = charts.get(parentElement)
  if (!chart) charts.set(parentElement, (chart = new LiveChart(parentElement.querySelector(".live-chart"))))
  chart.update(data)
  // Streamlit also runs the clean-up of a call that a newer one overtook: remove only what has left the page.
  return () =>
    setTimeout(() => {
      if (chart.element.isConnected) return
      chart.remove()
      charts.delete(parentElement)
    })
}
