{{- define "type" -}}
{{- $type := . -}}
{{- if markdownShouldRenderType $type }}
## {{ $type.Name }}
{{ if $type.IsAlias }}A {{ markdownRenderTypeLink $type.UnderlyingType }}. {{ end }}{{ $type.Doc }}
{{ if $type.References }}
Used in{{ range $type.SortedReferences }} {{ markdownRenderTypeLink . }}{{ end }}.
{{ end }}
{{- if $type.Validation }}
{{ range $type.Validation }}* {{ if hasPrefix "Pattern:" . }}Pattern, see the schema{{ else }}{{ replace ": {}" "" . }}{{ end }}
{{ end }}
{{- end }}
{{- if $type.Members }}
| field | type | what it says | bounds |
| --- | --- | --- | --- |
{{ range $type.Members -}}
| `{{ .Name }}` | {{ markdownRenderType .Type }} | {{ if eq .Name "metadata" }}metadata is the object's standard metadata.{{ else }}{{ markdownRenderFieldDoc .Doc | replace "<br />" " " }}{{ end }} | {{ range $i, $v := .Validation }}{{ if $i }}; {{ end }}{{ if hasPrefix "Pattern:" $v }}Pattern{{ else }}{{ markdownRenderFieldDoc $v | replace ": \\{\\}" "" }}{{ end }}{{ end }} |
{{ end }}
{{- end }}
{{- if $type.EnumValues }}
| value | what it says |
| --- | --- |
{{ range $type.EnumValues -}}
| `{{ .Name }}` | {{ markdownRenderFieldDoc .Doc | replace "<br />" " " }} |
{{ end }}
{{- end }}
{{- end -}}
{{- end -}}
