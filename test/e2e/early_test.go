package e2e

import "context"

type earlyWorld struct{}
var early earlyWorld
func (e *earlyWorld) begin(ctx context.Context) {}
