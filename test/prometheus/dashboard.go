// This file reads the dashboard.

package prometheus

import (
	"encoding/json"
	"os"
	"strings"
	"time"
)

// DashboardFile is where the dashboard is, from here.
const DashboardFile = "../../config/prometheus/dashboard.json"

// Dashboard is what is read of a Grafana dashboard.
type Dashboard struct {
	Title  string  `json:"title"`
	Panels []Panel `json:"panels"`
}

// Panel is one of its panels.
type Panel struct {
	Title       string `json:"title"`
	Description string `json:"description"`
	GridPos     struct {
		X, Y, W, H int
	} `json:"gridPos"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
	} `json:"targets"`
}

// ReadDashboard reads it.
func ReadDashboard(path string) (Dashboard, error) {
	var d Dashboard
	text, err := os.ReadFile(path)
	if err != nil {
		return d, err
	}
	return d, json.Unmarshal(text, &d)
}

// Query fills in Grafana's variables: all namespaces and tools, and rates over this time.
func Query(expr string, over time.Duration) string {
	return strings.NewReplacer("$namespace", ".*", "$tool", ".*", "$__rate_interval", over.String()).Replace(expr)
}
