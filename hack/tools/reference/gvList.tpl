{{- define "gvList" -}}
<!-- Made from the types in api/ by make generate. -->
# API reference
{{ range . }}
All kinds are of `{{ .GroupVersionString }}`, are namespaced, and are listed by `kubectl get guardrails`:
{{- range .SortedKinds }} [{{ . }}](#{{ . | lower }})
{{- end }}.

No field of a `spec` has a default in the schema, so that what was applied reads back the same. Where a field is optional, its description names the effective value. Each kind has a page of its own that says how it is used.
{{ range .SortedTypes }}{{ template "type" . }}{{ end }}
{{- end }}
{{- end -}}
