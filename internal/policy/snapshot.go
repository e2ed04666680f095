// This file is about what is served now: one immutable snapshot of all tools,
// swapped atomically. A call looks a tool up once and keeps what it got, so it runs
// under one policy from its beginning to its end.

package policy

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
)

// ErrNoTool: there is no such AgentTool.
var ErrNoTool = errors.New("no such tool")

// Why a tool is not served.
const (
	// ReasonPending: nothing is known of the tool yet.
	ReasonPending = "Pending"
	// ReasonInvalid: the tool's spec cannot be used.
	ReasonInvalid = "Invalid"
	// ReasonBudgetNotFound: the tool's IntentBudget does not exist.
	ReasonBudgetNotFound = "BudgetNotFound"
	// ReasonBudgetInvalid: the spec of the tool's IntentBudget cannot be used.
	ReasonBudgetInvalid = "BudgetInvalid"
)

// NotServedError is a tool that exists and is not served.
type NotServedError struct {
	Namespace string
	Tool      string
	// Reason is one word.
	Reason string
	// Message says why, and what to do.
	Message string
}

func (e *NotServedError) Error() string {
	return fmt.Sprintf("tool %s/%s is not served (%s): %s", e.Namespace, e.Tool, e.Reason, e.Message)
}

type toolName struct{ namespace, name string }

// entry is a tool that is served, or why it is not.
type entry struct {
	tool      *Tool
	notServed *NotServedError
}

// Snapshot is all tools at one moment. It never changes.
type Snapshot struct{ tools map[toolName]entry }

// Tool gives a tool that is served. One that is not is a *NotServedError, one that
// does not exist ErrNoTool.
func (s *Snapshot) Tool(namespace, name string) (*Tool, error) {
	switch e, ok := s.tools[toolName{namespace, name}]; {
	case !ok:
		return nil, fmt.Errorf("%s/%s: %w", namespace, name, ErrNoTool)
	case e.notServed != nil:
		return nil, e.notServed
	default:
		return e.tool, nil
	}
}

// Names calls yield with every tool that exists, served or not.
func (s *Snapshot) Names(yield func(namespace, name string)) {
	for n := range s.tools {
		yield(n.namespace, n.name)
	}
}

// Current is the snapshot that is served. Its zero value serves nothing. All
// methods may be called at the same time.
type Current struct {
	// mu orders writers; readers never wait.
	mu sync.Mutex
	at atomic.Pointer[Snapshot]
}

var empty = &Snapshot{}

// Load gives the snapshot that is served now.
func (c *Current) Load() *Snapshot {
	if s := c.at.Load(); s != nil {
		return s
	}
	return empty
}

// Set serves a tool.
func (c *Current) Set(tool *Tool) {
	c.replace(func(tools map[toolName]entry) { tools[toolName{tool.Namespace, tool.Name}] = entry{tool: tool} })
}

// Refuse keeps a tool from being served, and says why.
func (c *Current) Refuse(why *NotServedError) {
	c.replace(func(tools map[toolName]entry) { tools[toolName{why.Namespace, why.Tool}] = entry{notServed: why} })
}

// Remove forgets a tool that was deleted.
func (c *Current) Remove(namespace, name string) {
	c.replace(func(tools map[toolName]entry) { delete(tools, toolName{namespace, name}) })
}

// replace swaps in a snapshot that differs from the last one by what change does.
func (c *Current) replace(change func(map[toolName]entry)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	tools := maps.Clone(c.Load().tools)
	if tools == nil {
		tools = map[toolName]entry{}
	}
	change(tools)
	c.at.Store(&Snapshot{tools: tools})
}
