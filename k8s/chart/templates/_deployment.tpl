{{/*
A central component: its Deployment and its Service. Arguments: root, component, image, args, port, values, config (the suffix of its
ConfigMap), settings (the content of that ConfigMap), and optionally replicas, recreate, spread, account, store, receiver.
*/}}
{{- define "gpuledger.central" -}}
{{- $fullname := include "gpuledger.fullname" .root -}}
{{- $kafka := include "gpuledger.kafkaVariables" .root -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  replicas: {{ .replicas | default 1 }}
  {{- if .recreate }}
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 6 }}
  template:
    {{- include "gpuledger.podMetadata" (merge (dict "settings" (print .settings $kafka)) .) | nindent 4 }}
    spec:
      {{- with .account }}
      serviceAccountName: {{ . }}
      {{- end }}
      automountServiceAccountToken: {{ not (empty .account) }}
      {{- if .spread }}
      # Spread over nodes and zones if there are several. Only preferred, so that a single node can run all pods, and a
      # roll-out of as many pods as nodes does not need another node.
      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 20 }}
      topologySpreadConstraints:
        - topologyKey: topology.kubernetes.io/zone
          maxSkew: 1
          whenUnsatisfiable: ScheduleAnyway
          # Counted for each roll-out separately: pods that it replaces do not count.
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 14 }}
      {{- end }}
      terminationGracePeriodSeconds: 20
      {{- include "gpuledger.centralPod" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          {{- include "gpuledger.imageOf" . | nindent 10 }}
          args: {{ .args | toJson }}
          envFrom:
            - configMapRef: {name: {{ $fullname }}-kafka}
          env:
            {{- include "gpuledger.kafkaUser" . | nindent 12 }}
            {{- with .values.extraEnv }}{{ toYaml . | nindent 12 }}{{ end }}
          ports:
            - name: http
              containerPort: {{ .port }}
          {{- include "gpuledger.probes" . | nindent 10 }}
          resources: {{- toYaml .values.resources | nindent 12 }}
          {{- include "gpuledger.containerSecurity" . | nindent 10 }}
          volumeMounts:
            - name: settings
              mountPath: /etc/gpuledger
              readOnly: true
            - name: kafka
              mountPath: /run/secrets/kafka
              readOnly: true
            {{- if .store }}
            - name: store
              mountPath: /var/lib/gpuledger
            {{- end }}
            {{- if .values.credentialsSecret }}
            - name: {{ .receiver }}
              mountPath: /run/secrets/{{ .receiver }}
              readOnly: true
            {{- end }}
      volumes:
        - name: settings
          configMap: {name: {{ $fullname }}-{{ .config }}}
        {{- include "gpuledger.kafkaVolume" . | nindent 8 }}
        {{- if .store }}
        - name: store
          persistentVolumeClaim: {claimName: {{ $fullname }}-store}
        {{- end }}
        {{- with .values.credentialsSecret }}
        - name: {{ $.receiver }}
          secret: {secretName: {{ . }}}
        {{- end }}
---
{{ include "gpuledger.service" . }}
{{- if .spread }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # Pods that are not ready may always be evicted; otherwise no node could be drained while Kafka is unavailable.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "gpuledger.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* The ConfigMap with a settings file. Arguments: root, component, name, file, settings. */}}
{{- define "gpuledger.settingsMap" -}}
apiVersion: v1
kind: ConfigMap
metadata: {{- include "gpuledger.metadata" . | nindent 2 }}
data:
  {{ .file }}: |
    {{- .settings | nindent 4 }}
{{- end }}
