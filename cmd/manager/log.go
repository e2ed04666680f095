// This file makes the process's two logs. Both write the same lines to the same place;
// one leaves out much of a burst of equal messages, the other one nothing: what somebody
// may need to find out what became of a payment must be there, however much happened in
// the same second.

package main

import (
	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	uberzap "go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

// loggers are as the flags say; whole is without the sampling.
func loggers(o zap.Options) (sampled, whole logr.Logger) {
	var core zapcore.Core
	// The options given come before those of zap's defaults, among which is the sampling:
	// what they see is the core without it.
	o.ZapOpts = append(o.ZapOpts, uberzap.WrapCore(func(c zapcore.Core) zapcore.Core {
		core = c
		return c
	}))
	l := zap.NewRaw(zap.UseFlagOptions(&o))
	return zapr.NewLogger(l), zapr.NewLogger(l.WithOptions(uberzap.WrapCore(func(zapcore.Core) zapcore.Core { return core })))
}
